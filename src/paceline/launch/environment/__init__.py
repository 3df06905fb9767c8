"""Environments: the store of built ones, how they are built, and probes of a job's environment."""
