"""The fitness check of a run, before its ranks start."""
