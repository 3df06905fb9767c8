"""The agent: the process on each node that starts the ranks, watches them and writes the verdict.

Standard library only, so that it runs from a zip file on any Python that a node has.
"""
