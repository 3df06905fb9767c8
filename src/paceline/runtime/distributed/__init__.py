"""Rank, device and process groups."""
