"""How files and folders are named, and opened where others may have prepared them."""
