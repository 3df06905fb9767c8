"""The numbers that a run has logged, read as they are written and thinned out for display."""
