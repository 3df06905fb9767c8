"""Run folders: created, filled, compared and exported."""
