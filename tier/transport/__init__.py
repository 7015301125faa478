"""Fetches between nodes, without I/O: frames on the wire, their checks, and which fetches run."""
