"""Running agents on this machine."""
