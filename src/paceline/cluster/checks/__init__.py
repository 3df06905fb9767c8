"""What could go wrong with a job, checked before it is queued."""
