"""Read secret files."""
