"""Processes: how they begin, recognize each other and end."""
