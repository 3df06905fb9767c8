"""What `paceline doctor` asks the nodes of a live run."""
