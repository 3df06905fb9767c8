"""The format of checkpoints on disk: folder names, the safetensors layout, and the marker that completes one."""
