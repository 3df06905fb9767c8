"""Copies data to a node's own disk before the ranks start, and results back afterwards, as `[data]` requests.

An agent uses `node_data`: request -> manifest -> stage (copy, packs, prefetch, cache) -> collect -> cleanup.
"""
