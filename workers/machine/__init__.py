"""Limits of the machine and its containers, and network endpoints."""
