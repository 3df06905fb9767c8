"""Node and rank health: preflight, heartbeats, the watchdog and node metrics."""
