"""What happens between two training steps: heartbeats, saves, stops, and checks on the run's health."""
