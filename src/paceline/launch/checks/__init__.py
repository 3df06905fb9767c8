"""Checks of a job and of this machine, before anything is queued."""
