"""The health of a node and its ranks: preflight, heartbeats, hangs, and ranks that linger."""
