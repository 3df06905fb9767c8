"""Checkpoints: complete or absent, written beside the training, readable with any number of ranks.

A save copies this rank's share of the state into memory that is the file already (`shares`, `image`); a thread
writes it (`writer`); rank 0 commits it with a marker (`marker`) and removes old ones (`retention`). Reading goes
the other way (`newest`, `reader`, `restore`). State cut over a device mesh goes through `sharded`.

The names below are resolved on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runtime.checkpoint.manager import Checkpoints, Restored, Saved
    from paceline.runtime.checkpoint.retention import Policy

__all__ = ["Checkpoints", "Policy", "Restored", "Saved"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    room = "retention" if name == "Policy" else "manager"
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
