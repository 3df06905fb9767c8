"""Warm starts: a process that has torch imported stays after a run, and forks the zygotes of the
next ones.
"""
