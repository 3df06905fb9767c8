"""How the agents of a run stage together: one per node copies, and the head agent scans the
sources for all.
"""
