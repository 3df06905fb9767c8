"""Iterable datasets and WebDataset pipelines: sharding, loading and positions."""
