"""What is shown, read in threads."""
