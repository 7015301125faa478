"""Reads and checks what clients ask."""
