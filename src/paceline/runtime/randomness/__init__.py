"""Seeds, and the states of random number generators."""
