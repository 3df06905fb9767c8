"""Metrics, scores of sweep trials, and the progress bar."""
