"""Starting the ranks, one module per way of starting them, and capturing what they print."""
