"""Sampling: token choice, penalties, log probabilities."""
