"""kvtier: a distributed multi-tier KV cache service for transformer inference."""

__version__ = "0.1.0"
