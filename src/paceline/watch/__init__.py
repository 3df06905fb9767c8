"""Read run folders and the scheduler to report on runs.

What is written here are only copies that save work: an index of rows, answers of the scheduler, and
mirrors of runs on other clusters. Two modules change run folders: `ended_secrets` forgets the
secrets of runs that are over, and `silence` makes a file for a moment, to ask the file server for
its time.
"""
