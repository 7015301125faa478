"""Replay of a trace through caches: the live policies, published ones, and a chain of tiers."""
