"""Runs of a cluster on this machine: a reader there sends what changes, and a folder here keeps it."""
