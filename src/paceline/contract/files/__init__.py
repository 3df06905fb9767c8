"""Files that others may have prepared: in folders that all users share, and in formats that we must not trust."""
