"""How the agents of a run find each other and keep in touch."""
