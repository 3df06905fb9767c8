"""Is the node fit, and do the ranks make progress? Preflight, heartbeats, watchdog and node metrics."""
