"""State sharded over a device mesh (FSDP2, DTensor). `state` saves and loads it, `storage` is its
format on disk.
"""
