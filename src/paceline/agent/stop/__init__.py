"""Stop requests: how they reach the ranks, and which frameworks the ranks use."""
