"""Weights & Biases, safe on every rank and without a network."""
