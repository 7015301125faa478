"""Requests and sequences: what goes into a worker and comes out, keys of pages, sessions."""
