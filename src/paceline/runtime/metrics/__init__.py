"""Numbers and events that a run records: metrics, scores of sweep trials, and the progress bar."""
