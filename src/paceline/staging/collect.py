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

from paceline.contract.files import replace_file, show_size
from paceline.errors import PacelineError
from paceline.staging.copy import Transfer, copy_file


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
    data: Path,
    destination: Path,
    *,
    patterns: Sequence[str],
    staged: Sequence[str],
    keep_newer: bool = False,
) -> CollectResult:
    """Copy what matches some patterns below `data` to the same relative paths below `destination`.

    With `keep_newer`, files stay there that are newer, by their times: what a killed run has left
    on a node is collected late. Without, nothing is compared, as hosts' clocks may differ.
    """
    sizes = []
    for name in _find_names(data, patterns, staged):
        with suppress(OSError):
            sizes.append((os.lstat(data / name).st_size, name))
    result, transfer = CollectResult(), Transfer()

    def copy(name: str) -> None:
        source, target = data / name, destination / name
        try:
            status = source.lstat()
            if os.path.lexists(target):
                existing = target.lstat()
                if (existing.st_mtime_ns, existing.st_size) == (status.st_mtime_ns, status.st_size):
                    return
                if keep_newer and existing.st_mtime_ns > status.st_mtime_ns:
                    result.outdated.append(name)
                    return
            if _replace(source, target, transfer):
                result.sizes.append(status.st_size)
        except OSError as error:
            result.problems.append(f"{name!r}: {error.strerror}")
        except PacelineError as error:  # it changed meanwhile
            result.problems.append(f"{name!r}: {error.message}")

    transfer.run([partial(copy, name) for _, name in sorted(sizes)])
    return result


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
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        status = source.lstat()
        target.unlink(missing_ok=True)
        os.symlink(os.readlink(source), target)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
    elif source.is_file():
        mode = source.stat().st_mode & 0o777 | 0o600
        # the node may be gone in a second, and its cache with it
        with replace_file(target, mode=mode, sync=True) as file:
            copy_file(str(source), file, transfer)
    else:
        return False
    return True
