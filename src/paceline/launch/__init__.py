"""Everything that acts on this machine or on Slurm. Only this, `sandbox` and `agent` call
subprocess.
"""
