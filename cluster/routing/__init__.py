"""Chooses the worker of a request."""
