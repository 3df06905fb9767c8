"""Names of checkpoint folders."""

from __future__ import annotations

import re

CHECKPOINT_MARKER = "complete.json"  # a checkpoint folder without it is not a checkpoint


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for a partial or removed one, and for anything else."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None
