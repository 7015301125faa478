"""RVI, the reuse-value index, and the reuse model that it learns."""
