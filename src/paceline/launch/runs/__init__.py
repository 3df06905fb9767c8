"""Run folders: create, fill, compare and export them."""
