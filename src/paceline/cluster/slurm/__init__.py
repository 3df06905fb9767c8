"""Slurm's commands, what their output means, and the cluster's limits."""
