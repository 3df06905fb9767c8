"""Slurm: its commands, job states, partitions and limits."""
