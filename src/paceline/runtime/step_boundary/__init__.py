"""What happens between training steps: heartbeats, saves, stops, and health checks."""
