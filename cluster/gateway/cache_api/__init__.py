"""The Cache service: verbs over all workers and nodes."""
