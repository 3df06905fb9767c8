"""What runs on the login node, started through the connection and ended with it."""
