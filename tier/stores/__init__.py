"""Bytes of pages below L1: the L3 slab in shared memory, and L4."""
