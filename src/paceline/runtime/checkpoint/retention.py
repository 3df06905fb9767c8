"""Retention: which checkpoints to keep, and how the others are removed. The newest complete one always stays."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.marker import Marker, list_checkpoints, read_marker
from paceline.contract.checkpoint.names import REMOVED, checkpoint_name
from paceline.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the last `keep_last`, every step that is a multiple of `keep_every`, and the best by a metric."""

    keep_last: int = 2
    keep_every: int | None = None
    best: str | None = None
    """A name in the `metrics` of the saved `meta`."""
    best_mode: str = "min"

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(
                f"keep_last is {self.keep_last}, but the newest checkpoint always stays.",
                hint="Set keep_last to 1 or more.",
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(
                f"keep_every is {self.keep_every}, but it must be at least 1.",
                hint="Set keep_every to a number of steps, or remove it.",
            )
        if self.best_mode not in ("min", "max"):
            raise UsageError(f"Invalid best_mode {self.best_mode!r}.", hint='Use "min" or "max".')


def steps_to_keep(markers: list[Marker], policy: RetentionPolicy) -> set[int]:
    """Return the steps to keep of these complete checkpoints."""
    steps = sorted((marker.step for marker in markers), reverse=True)
    keep = set(steps[: policy.keep_last])
    if policy.keep_every:
        keep |= {step for step in steps if step % policy.keep_every == 0}
    if policy.best:
        values = [
            (value, marker.step) for marker in markers if (value := _metric(marker.meta, policy.best)) is not None
        ]
        if values:
            # Of equals the newest, which has trained longer.
            best = min(values) if policy.best_mode == "min" else max(values)
            keep.add(max(step for value, step in values if value == best[0]))
    return keep


def _metric(meta: Any, name: str) -> float | None:
    metrics = meta.get("metrics") if isinstance(meta, dict) else None
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def prune(folder: Path, policy: RetentionPolicy, *, damaged: Iterable[Path], attempt: int) -> None:
    """After a commit, remove checkpoints that the policy doesn't keep and those that were found damaged."""
    damaged = set(damaged)
    markers: list[Marker] = []
    for path in list_checkpoints(folder):
        try:
            if path not in damaged:
                markers.append(read_marker(path))
        except CheckpointError:
            continue  # no marker, or one from another version: not ours to remove
    keep = steps_to_keep(markers, policy)
    for marker in markers:
        if marker.step not in keep:
            remove(folder / checkpoint_name(marker.step), attempt=attempt)
    for path in damaged:
        remove(path, attempt=attempt)


def remove(path: Path, *, attempt: int) -> None:
    """Rename a checkpoint, so that it no longer counts as one however long the deletion takes, and delete it."""
    renamed = path.with_name(f"{path.name}{REMOVED}{attempt}")
    try:
        shutil.rmtree(renamed, ignore_errors=True)
        os.rename(path, renamed)
    except OSError:
        return
    shutil.rmtree(renamed, ignore_errors=True)


def remove_leftovers(folder: Path, *, attempt: int, before: int | None = None) -> None:
    """Remove partial folders that earlier attempts and failed saves left behind.

    `before` spares saves of this attempt from that number on: another rank may already have started the next one.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = re.fullmatch(r"step-\d+\.(tmp|removed)-(\d+)(?:-(\d+))?(\.failed)?", name)
        if match is None:
            continue
        is_current = int(match[2]) == attempt and match[1] == "tmp"
        if is_current and before is not None and int(match[3] or 0) >= before:
            continue
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
