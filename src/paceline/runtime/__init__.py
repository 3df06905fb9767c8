"""What a training script imports. Nothing is imported here: `identity` must stay free of torch."""
