"""Forwards over pages, and their comparison with transformers' own."""
