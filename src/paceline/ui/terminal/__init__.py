"""Pictures in a terminal."""
