"""Pages of other nodes: where each comes from soonest, fetches, and saves on demand."""
