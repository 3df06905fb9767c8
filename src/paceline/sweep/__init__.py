"""Sweeps: search spaces, samplers, job arrays and results."""
