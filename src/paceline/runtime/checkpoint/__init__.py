"""Checkpoints: complete or absent, written in the background, readable with any number of ranks.

`manager` is the entry point. To save, `state_tree` turns the objects' state into JSON and named
tensors, `save_buffer` holds what this rank writes as the finished file, and `writer` writes it in
a thread, commits the checkpoint and lets `retention` remove old ones. To load, `reader` finds the
newest intact checkpoint and reads its tensors, and `restore` loads them into the objects.
`sharded` handles state on a device mesh, and `folder_owner` keeps other runs out.
`contract.checkpoint` has the format.
"""
