"""Starts the ranks of a node, one module per launch style, and captures their output."""
