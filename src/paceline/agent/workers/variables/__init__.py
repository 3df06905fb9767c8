"""The environment variables of the ranks."""
