"""Iterable data sets and WebDataset pipelines: sharding, loading and positions."""
