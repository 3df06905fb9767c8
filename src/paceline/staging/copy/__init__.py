"""Copies files to a node's own disk: large ones in pieces, small ones in groups."""
