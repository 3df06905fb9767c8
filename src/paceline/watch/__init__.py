"""Read run folders and the scheduler to report on runs.

Nothing is written here but the answers of the scheduler, which all commands share.
"""
