"""What runs inside the job ahead of the script: it starts the ranks, looks after them and says how it ended.

Standard library only, so that it works from a zip on any Python that a node may have.
"""
