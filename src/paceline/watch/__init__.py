"""Read run folders and the scheduler to report on runs.

What is written here are only copies that save work: an index of rows, and answers of the scheduler.
`silence` makes a file in a run folder for a moment, to ask the file server for its time.
"""
