"""A worker's L1: the prefix index (radix trees) and the arena of frames."""
