"""Retention: which checkpoints to keep, and how the others are removed. The newest complete one
always stays.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import (
    CHECKPOINT_MARKER,
    REMOVED,
    Marker,
    checkpoint_name,
    choose_best,
    is_better,
    is_complete,
    list_checkpoints,
    read_marker,
)
from paceline.contract.run_folder import write_atomically
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the last `keep_last`, every step that is a multiple of `keep_every`, and the best by a
    metric.
    """

    keep_last: int = 2
    keep_every: int | None = None
    best: str | None = None
    """The metric by which checkpoints are scored."""
    best_mode: str = "min"


def attach(checkpoint: Path, score: dict[str, Any]) -> None:
    """Write a score into a committed checkpoint, if there is one that can be written."""
    with contextlib.suppress(CheckpointError, OSError):
        marker = read_marker(checkpoint)
        meta = {**(marker.meta if isinstance(marker.meta, dict) else {}), **score}
        if meta != marker.meta:
            text = replace(marker, meta=meta).to_json()
            write_atomically(checkpoint / CHECKPOINT_MARKER, text, sync=True)


def is_new_best(value: float, folder: Path, policy: RetentionPolicy) -> bool:
    """Return whether a value of the policy's metric is better than those of all checkpoints."""
    if math.isnan(value) or policy.best is None:
        return False
    best = choose_best(_read_markers(folder), policy.best, policy.best_mode)
    return best is None or is_better(value, best[1].value, policy.best_mode)


def _read_markers(folder: Path, damaged: Collection[Path] = ()) -> list[Marker]:
    markers: list[Marker] = []
    for path in list_checkpoints(folder):
        try:
            if path not in damaged:
                markers.append(read_marker(path))
        except CheckpointError:
            continue  # no marker, or one from another version: not ours to remove
    return markers


def prune(folder: Path, policy: RetentionPolicy, *, damaged: Iterable[Path], attempt: int) -> None:
    """After a commit, remove checkpoints that the policy doesn't keep and those that were found
    damaged.
    """
    damaged = set(damaged)
    markers = _read_markers(folder, damaged)
    best = choose_best(markers, policy.best, policy.best_mode) if policy.best else None
    steps = sorted((marker.step for marker in markers), reverse=True)
    for number, step in enumerate(steps):
        is_regular = policy.keep_every is not None and step % policy.keep_every == 0
        is_best = best is not None and step == best[0]
        if number >= policy.keep_last and not is_regular and not is_best:
            damaged.add(folder / checkpoint_name(step))
    for path in damaged:
        renamed = set_aside(path, attempt=attempt)
        if renamed is not None:
            shutil.rmtree(renamed, ignore_errors=True)


def set_aside(path: Path, *, attempt: int) -> Path | None:
    """Rename a checkpoint, so that it no longer counts as one however long its deletion takes.
    Return its new name, or None if that fails.
    """
    renamed = path.with_name(f"{path.name}{REMOVED}{attempt}")
    try:
        shutil.rmtree(renamed, ignore_errors=True)
        os.rename(path, renamed)
    except OSError:
        return None
    return renamed


def clean_up(folder: Path, *, attempt: int, before: int | None = None) -> None:
    """Remove partial folders that earlier attempts and failed saves left behind.

    `before` spares saves of this attempt from that number on: another rank may already have started
    the next one. Without it, a complete folder is renamed into place whose run ended between
    removing the old one of the step and that.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = re.fullmatch(r"(step-\d+)\.(tmp|removed)-(\d+)(?:-(\d+))?", name)
        if match is None:
            continue
        step, kind, by, number = match.groups()
        is_current = kind == "tmp" and int(by) == attempt
        if before is None and kind == "tmp" and step not in names and is_complete(folder / name):
            with contextlib.suppress(OSError):
                os.rename(folder / name, folder / step)
        elif not is_current or before is None or int(number or 0) < before:
            shutil.rmtree(folder / name, ignore_errors=True)
