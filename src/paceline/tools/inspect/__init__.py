"""What a script's loaders give to each rank: a recorded run, checks of it, and a picture."""
