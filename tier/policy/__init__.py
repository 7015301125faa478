"""Eviction: what a policy is asked and told, the live policies, and the guard that compares them with LRU."""
