"""Pages of L1 by sequence: frames, page table, pool, eviction, and copies of pages' bytes."""
