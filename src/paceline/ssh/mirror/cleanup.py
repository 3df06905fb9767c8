"""Keep mirrors on this machine small: remove those of unused clusters, and the oldest runs.

This happens once a day, in the background of a command. Everything in a mirror can be fetched again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.ssh.mirror.mirror_folder import STATE, Mirror
from paceline.ssh.mirror.write_lock import MirrorBusy

LIMIT = 4 << 30  # bytes that all mirrors together may take
UNUSED = 90 * 86_400.0  # seconds without a word from a cluster after which its mirror is removed
RECENT = 86_400.0  # runs that have changed since then stay, however large they are
INTERVAL = 86_400.0  # seconds between two looks
STAMP = "cleaned"
GONE = ".gone-"


def clean_mirrors(folder: Path, *, limit: int = LIMIT) -> None:
    """Remove what is too old or too much. `folder` has the mirrors as `<cluster>/<key>`."""
    with suppress(OSError):
        if _age(folder / STAMP) < INTERVAL:
            return
        used: list[Path] = []
        for base in sorted(
            path for path in folder.glob("*/*") if path.is_dir() and not path.is_symlink()
        ):
            for left in base.glob(f"{GONE}*"):  # by a command that was interrupted
                shutil.rmtree(left, ignore_errors=True)
            if _age(base / STATE) > UNUSED and _age(base) > UNUSED:
                shutil.rmtree(base, ignore_errors=True)
            else:
                used.append(base)
        _remove_oldest(used, limit)
        (folder / STAMP).touch()


def _remove_oldest(bases: list[Path], limit: int) -> None:
    found = [
        (run, base)
        for base in bases
        for run in (base / "runs").glob("*/*/*")
        if not run.is_symlink()
    ]
    runs = [(*_describe(run), run, base) for run, base in found]
    total = sum(size for _, size, _, _ in runs)
    for changed, size, run, base in sorted(runs):
        if total <= limit or time.time() - changed < RECENT:
            return
        gone = base / f"{GONE}{os.urandom(6).hex()}"
        with suppress(OSError, MirrorBusy):
            with Mirror(base).lock():  # whoever writes to it now begins anew
                os.rename(run, gone)
            shutil.rmtree(gone, ignore_errors=True)
            total -= size


def _describe(run: Path) -> tuple[float, int]:
    """Return when a run last changed, by the times that its files had on the cluster, and what it takes here."""
    changed, size = 0.0, 0
    for path in _files(run):
        with suppress(OSError):
            status = path.lstat()
            # logs may have holes
            changed, size = max(changed, status.st_mtime), size + 512 * status.st_blocks
    return changed, size


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _age(path: Path) -> float:
    """Return the seconds since a file was changed; many if there is none."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")
