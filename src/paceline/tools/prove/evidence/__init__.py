"""What the records of two cases show: about their samples, their gradients, and whether they repeat."""
