"""Checkpoints: complete or absent, written beside the training, readable with any number of ranks.

A save copies this rank's share of the state into memory that is the file already (`shares`, `image`); a thread
writes it (`writer`); rank 0 commits it with a marker (`marker`) and removes old ones (`retention`). Reading goes
the other way (`source`, `restoring`). State cut over a device mesh goes through `sharded`.
"""

from paceline.runtime.checkpoint.checkpoints import Checkpoints, Restored, Saved
from paceline.runtime.checkpoint.retention import Policy

__all__ = ["Checkpoints", "Policy", "Restored", "Saved"]
