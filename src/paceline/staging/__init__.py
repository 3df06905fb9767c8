"""Copies what a run needs to where it runs: data to a node's own disk, code to the working
directory, results back.

request -> manifest -> stage (copy, packs, prefetch, cache) -> collect -> cleanup. Agents do it on
nodes, and
`paceline data stage` and `clean` do it from the command line.
"""
