"""The fitness check: a matrix product and exchanges with other ranks, measured before training."""
