"""The dashboard in the browser: a server on this machine that reads run folders, and the pages
that it serves.
"""
