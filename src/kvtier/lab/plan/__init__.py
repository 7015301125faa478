"""Sizes: bytes of a model's KV cache, the batch that fits a GPU, and tiers that reach a hit rate on a trace."""
