"""Who this rank is, which device it uses, and how it reaches the other ranks."""
