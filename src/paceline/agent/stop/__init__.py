"""Stop requests: signals that an agent receives, how they reach the ranks, and which frameworks the
ranks use.

At the time limit, Slurm signals the batch shell; `plan/slurm/stop_and_requeue.sh` creates the file
`stop`. `attempt.py` polls it.
"""
