"""Model wrapping, precision, gradient accumulation and optimizer steps."""
