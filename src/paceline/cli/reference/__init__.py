"""The reference: every key, flag, method and attribute, from the code. Pages for docs/, entries for a terminal."""
