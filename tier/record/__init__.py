"""Recordings of a state machine: writing, reading, running again, export as a trace."""
