"""Starts a deployment, watches its parts, and restarts them."""
