"""Run folders and the scheduler, read together: what becomes of runs. Nothing here writes."""
