"""Published eviction policies, the optimum, and the cache without a bound; for replay only."""
