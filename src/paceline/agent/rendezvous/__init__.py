"""The rendezvous: how the agents of a run find each other and stay in contact."""
