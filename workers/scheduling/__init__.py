"""Continuous batching: admission, prefill chunks, preemption. The step loop calls it, and it owns the page table."""
