"""Which checkpoints stay. The newest complete one always does."""

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

from paceline.contract.checkpoint import marker
from paceline.contract.checkpoint.names import checkpoint_name
from paceline.errors import CheckpointError, UsageError

PARTIAL = ".tmp-"  # step-N.tmp-<attempt>-<save>: being written
FAILED = ".failed"  # step-N.tmp-<attempt>-<save>.failed: given up, for ranks that wait for it
REMOVED = ".removed-"  # step-N.removed-<attempt>: no longer a checkpoint, being deleted


@dataclass(frozen=True)
class Policy:
    """Keep the last `keep_last`, every one whose step is a multiple of `keep_every`, and the best by a metric."""

    keep_last: int = 2
    keep_every: int | None = None
    best: str | None = None
    """A name in the `metrics` of what was given as `meta`."""
    best_mode: str = "min"

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(
                f"keep_last is {self.keep_last}", hint="at least 1: the newest checkpoint always stays"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"keep_every is {self.keep_every}", hint="a number of steps, or leave it out")
        if self.best_mode not in ("min", "max"):
            raise UsageError(f"best_mode is {self.best_mode!r}", hint='"min" or "max"')


def kept(found: list[marker.Marker], policy: Policy) -> set[int]:
    """The steps that stay, of these complete checkpoints."""
    steps = sorted((each.step for each in found), reverse=True)
    stay = set(steps[: policy.keep_last])
    if policy.keep_every:
        stay |= {step for step in steps if step % policy.keep_every == 0}
    if policy.best:
        valued = [
            (value, each.step) for each in found if (value := _metric(each.meta, policy.best)) is not None
        ]
        if valued:
            # Of equals the newest: its training has gone further.
            best = min(valued) if policy.best_mode == "min" else max(valued)
            stay.add(max(step for value, step in valued if value == best[0]))
    return stay


def _metric(meta: Any, name: str) -> float | None:
    metrics = meta.get("metrics") if isinstance(meta, dict) else None
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def tidy(folder: Path, policy: Policy, *, damaged: Iterable[Path], attempt: int) -> None:
    """After a commit: drop what the policy does not keep, and those that were found damaged."""
    bad = set(damaged)
    found: list[marker.Marker] = []
    for each in marker.checkpoints(folder):
        try:
            if each not in bad:
                found.append(marker.read(each))
        except CheckpointError:
            continue  # no marker, or one that another version wrote: not ours to remove
    stay = kept(found, policy)
    for complete in found:
        if complete.step not in stay:
            discard(folder / checkpoint_name(complete.step), attempt=attempt)
    for path in bad:
        discard(path, attempt=attempt)


def discard(path: Path, *, attempt: int) -> None:
    """Rename first: from that moment it is no checkpoint, however long the deletion takes."""
    away = path.with_name(f"{path.name}{REMOVED}{attempt}")
    try:
        shutil.rmtree(away, ignore_errors=True)
        os.rename(path, away)
    except OSError:
        return
    shutil.rmtree(away, ignore_errors=True)


def sweep(folder: Path, *, attempt: int, before: int | None = None) -> None:
    """Remove what earlier attempts and failed saves left half-written.

    `before`: of this attempt only saves with a lower number. Another rank may have begun the next one already.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = re.fullmatch(r"step-\d+\.(tmp|removed)-(\d+)(?:-(\d+))?(\.failed)?", name)
        if match is None:
            continue
        is_mine = int(match[2]) == attempt and match[1] == "tmp"
        if is_mine and before is not None and int(match[3] or 0) >= before:
            continue
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
