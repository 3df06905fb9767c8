"""Samples on their way to a rank: loaders, streams, sharding, evaluation, workers and randomness."""
