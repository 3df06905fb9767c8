"""Ask the nodes of a live run."""
