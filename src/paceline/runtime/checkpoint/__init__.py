"""Checkpoints: complete or absent, written beside the training, readable with any number of ranks.

A save copies this rank's share of the state into memory that is the file already (`shares`, `image`); a thread
writes it (`writer`); rank 0 commits it with a marker (`marker`) and removes old ones (`retention`). Reading goes
the other way (`finding`, `source`, `restoring`). State cut over a device mesh goes through `sharded`.

`layout` and `marker` need no torch, so that `paceline export` works on a login node: the names below are
resolved when they are asked for.
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
    room = "retention" if name == "Policy" else "checkpoints"
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
