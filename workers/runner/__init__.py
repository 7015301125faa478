"""Runs one model: weights, arena, steps, CUDA graphs, warm-up."""
