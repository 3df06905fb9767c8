"""Names of checkpoint folders and of the files in them."""

from __future__ import annotations

import re

CHECKPOINT_MARKER = "complete.json"  # a checkpoint folder without it is not a checkpoint
# the state of all replicated objects, with references instead of tensors
OBJECTS_FILE = "objects.json"
# tensors sharded over a device mesh: a file per rank, and an index of their parts
SHARDED_FOLDER = "sharded"
SHARD_INDEX = "index.json"
SHARE_SUFFIX = ".safetensors"
WEIGHTS_SUFFIXES = (SHARE_SUFFIX, ".pt", ".pth", ".bin")  # of files that a run can start from
PARTIAL = ".tmp-"  # step-N.tmp-<attempt>-<save>: being written
FAILED = ".failed"  # step-N.tmp-<attempt>-<save>.failed: abandoned, for ranks that wait for it
REMOVED = ".removed-"  # step-N.removed-<attempt>: being deleted


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in a checkpoint folder's name, or None for a partial or removed one and any
    other name.
    """
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def rank_suffix(rank: int, world_size: int) -> str:
    return f"{rank + 1:05d}-of-{world_size:05d}"


def share_file(rank: int, world_size: int) -> str:
    """Return the name of the file that holds a rank's share of the tensors."""
    return f"share-{rank_suffix(rank, world_size)}{SHARE_SUFFIX}"


def is_weights_file(name: str) -> bool:
    """Return whether a file, by its name, holds a model's weights: in safetensors, or as
    torch.save writes them.
    """
    return name.endswith(WEIGHTS_SUFFIXES)


def is_share(name: str) -> bool:
    """Return whether a file of a checkpoint holds a rank's share of the tensors."""
    return name.endswith(SHARE_SUFFIX) and "/" not in name


def shard_file(rank: int, world_size: int) -> str:
    """Return the name of the file that holds a rank's parts of sharded tensors."""
    return f"shard-{rank_suffix(rank, world_size)}{SHARE_SUFFIX}"


def state_file(rank: int, world_size: int) -> str:
    """Return the name of the file that holds a rank's own state."""
    return f"state-{rank_suffix(rank, world_size)}.json"
