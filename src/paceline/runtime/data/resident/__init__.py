"""Data that is already tensors, on the host or on the device, and functions of its batches."""
