"""Invariants of a node's tables, derived from scratch."""
