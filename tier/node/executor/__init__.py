"""Carries out what the coordinator orders on L3 and L4, on threads."""
