"""A node's tables: pages, copies, places, rankings, fetches, lent frames, misses."""
