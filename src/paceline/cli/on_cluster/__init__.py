"""`--on`: what a command sends to a cluster, how it runs there, and what comes back."""
