"""Starts the ranks of a node, forked, by torchrun or as new processes, and captures their
output.
"""
