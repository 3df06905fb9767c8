"""Data loading: loaders, streams, sharding, evaluation, workers and seeds."""
