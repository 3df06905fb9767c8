"""Processes that keep torch imported for the next runs."""

DEFAULT_WARM = 600  # seconds for which one stays unused: `warm = true` in [launch], and --warm
