"""The script's step function as a CUDA graph: `run.capture`."""
