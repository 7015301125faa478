"""Machines of a deployment: addresses, Ray nodes, placement, folders."""
