"""Collect results: copy each file completely or not at all, smallest first, and never over a newer
one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.contract.files import show_size
from paceline.contract.run_folder import write_atomically
from paceline.errors import PacelineError
from paceline.staging.copy import Transfer, copy_file

PARTIAL = ".paceline-partial"


@dataclass
class CollectResult:
    """What was collected."""

    sizes: list[int] = field(default_factory=list)  # of the files that were copied
    outdated: list[str] = field(default_factory=list)  # left: the destination has newer ones
    problems: list[str] = field(default_factory=list)

    def describe(self, host: str, destination: str) -> list[str]:
        """Return lines for the user."""
        lines = [
            f"warning: cannot collect a result on {host}: {problem}"
            for problem in self.problems[:5]
        ]
        if self.outdated:
            lines.append(
                f"left {len(self.outdated)} results on {host}: the run folder has newer ones"
            )
        if self.sizes:
            size = show_size(sum(self.sizes))
            lines.append(f"collected {len(self.sizes)} files ({size}) from {host}: {destination}")
        return lines


def collect(
    data: Path, destination: Path, *, patterns: Sequence[str], staged: Sequence[str], claim: int = 0
) -> CollectResult:
    """Copy what matches some patterns below `data` to the same relative paths below `destination`.

    Which of two files is newer is decided by the job starts that collected them, because their
    hosts' clocks may differ: a later job start's file wins. `claim` is the job start's number, from
    1. Times decide only within one.
    """
    earlier = _take_turn(destination, claim) if claim else claim
    sizes = []
    for name in _find_names(data, patterns, staged):
        with suppress(OSError):
            sizes.append((os.lstat(data / name).st_size, name))
    result, transfer = CollectResult(), Transfer()

    def copy(name: str) -> None:
        try:
            _collect_file(name)
        except OSError as error:
            result.problems.append(f"{name!r}: {error.strerror}")
        except PacelineError as error:  # it changed meanwhile
            result.problems.append(f"{name!r}: {error.message}")

    def _collect_file(name: str) -> None:
        source, target = data / name, destination / name
        status = os.lstat(source)
        try:
            existing = os.lstat(target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
        else:
            if (existing.st_mtime_ns, existing.st_size) == (status.st_mtime_ns, status.st_size):
                return
            is_newer = existing.st_mtime_ns > status.st_mtime_ns
            if claim < earlier or (claim == earlier and is_newer):
                result.outdated.append(name)
                return
        if _replace(source, target, transfer):
            result.sizes.append(status.st_size)

    transfer.run([partial(copy, name) for _, name in sorted(sizes)])
    return result


def _take_turn(destination: Path, claim: int) -> int:
    """Return which job start has collected here last, and leave this one's number for the next."""
    mark, earlier = destination.with_name(f".{destination.name}.claim"), claim
    with suppress(OSError, ValueError):
        earlier = int(mark.read_text(encoding="ascii"))
    if claim >= earlier:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(mark, f"{claim}\n")
    return earlier


def _find_names(data: Path, patterns: Sequence[str], staged: Sequence[str]) -> list[str]:
    """Return the files and links that match, without staged data: it does not come back."""

    def is_staged(name: str) -> bool:
        return any(name == each or name.startswith(f"{each}/") for each in staged)

    def files(name: str) -> Iterator[str]:
        path = data / name
        if path.is_symlink() or not path.is_dir():
            yield name
            return
        for folder, folders, found in os.walk(path):
            prefix = os.path.relpath(folder, data)
            folders[:] = [
                each for each in folders if not is_staged(os.path.normpath(f"{prefix}/{each}"))
            ]
            links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
            yield from (os.path.normpath(f"{prefix}/{each}") for each in [*found, *links])

    names: set[str] = set()
    for pattern in patterns:
        literal = os.path.normpath(pattern)
        exists = os.path.lexists(data / literal)
        for match in [literal] if exists else glob.glob(pattern, root_dir=data, recursive=True):
            names.update(files(os.path.normpath(match)))
    return sorted(name for name in names if not is_staged(name))


def _replace(source: Path, target: Path, transfer: Transfer) -> bool:
    """Put a copy of a file or link in the target's place. Return False for anything else."""
    partial_copy = target.with_name(f".{target.name}"[:200] + PARTIAL)
    with suppress(FileNotFoundError):
        os.unlink(partial_copy)
    try:
        if source.is_symlink():
            os.symlink(os.readlink(source), partial_copy)
            status = os.lstat(source)
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(partial_copy, ns=times, follow_symlinks=False)
        elif source.is_file():
            # the node may be gone in a second, and its cache with it
            copy_file(str(source), partial_copy, transfer, sync=True)
        else:
            return False
        os.replace(partial_copy, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial_copy)
        raise
    return True
