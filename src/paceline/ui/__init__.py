"""The views of runs: in a terminal, in a browser, and as a file to send.

They read folders, and know nothing of clusters.
"""
