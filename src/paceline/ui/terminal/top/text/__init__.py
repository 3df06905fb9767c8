"""Runs as text of a given width."""
