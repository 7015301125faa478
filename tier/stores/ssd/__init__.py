"""L4: slab files, the LMDB catalogue, and how both are opened, healed and moved."""
