"""Checkpoints: complete or absent, written in the background, readable with any number of ranks.

`manager` is the entry point. To save, `state_tree` turns the objects' state into JSON and named
tensors, `shares` decides which bytes each rank writes, `save_buffer` holds them in memory as the
finished file, and `writer` writes them in a thread, commits the checkpoint and lets `retention`
remove old ones. To load, `newest_complete` finds the newest intact checkpoint, `reader` reads its
tensors and `restore` loads them into the objects. `sharded` handles state on a device mesh, and
`folder_owner` keeps other runs out. `contract.checkpoint` has the format.

The names below are imported on first use, so that importing the package doesn't import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runtime.checkpoint.manager import CheckpointManager, Restored, Saved
    from paceline.runtime.checkpoint.retention import RetentionPolicy

__all__ = ["CheckpointManager", "Restored", "RetentionPolicy", "Saved"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    module = "retention" if name == "RetentionPolicy" else "manager"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
