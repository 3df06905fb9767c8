"""A Job as a Slurm batch script."""
