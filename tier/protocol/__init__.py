"""What a worker, a CacheNode and an exchange say to each other, with the range of each field, and the Unix socket between them."""
