"""Runs in a terminal: `paceline top`, and the pictures of `paceline show`."""
