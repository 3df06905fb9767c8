"""The format of checkpoints on disk: names, the safetensors layout, and the marker that makes one
complete.
"""
