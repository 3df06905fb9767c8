"""The states of jobs: how Slurm is asked for them, and what they mean for a run."""
