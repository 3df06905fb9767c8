"""Keep the cache on the login node small: remove what has not been used for a month.

This happens once a day, in the background of a command, and ends with it. Everything in the cache can be sent again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.contract.files.sent_code import KEPT
from paceline.ssh.remote.code_store import CODE, OBJECTS, PARTIAL
from paceline.ssh.remote.unpack import COMPLETE, is_whole

UNUSED = 30 * 86_400.0  # seconds after which something counts as no longer used
INTERVAL = 86_400.0  # seconds between two looks
PATIENCE = 20.0  # seconds for one look: a home folder may be slow
STAMP = "cleaned"
SUBMISSIONS = "submissions"  # a file for each submission from a laptop, by its id
REMEMBERED = 7 * 86_400.0  # seconds for which it stays


def note_use(installation: Path) -> None:
    """Note that an installation is in use, once a day."""
    with suppress(OSError):
        if _age(installation / COMPLETE) > INTERVAL:
            os.utime(installation / COMPLETE)


def is_damaged(installation: Path, *, thorough: bool) -> bool:
    """Return whether files of an installation are missing: many clusters remove what nobody has used for weeks.

    Looking at each file takes a while on a slow home folder, so it happens only once a day, or if it is to be thorough:
    a job takes files along that this command does not need itself.
    """
    try:
        is_due = thorough or _age(installation / COMPLETE) > INTERVAL
    except OSError:
        return True
    return is_due and not is_whole(str(installation))


def clean_cache(cache: Path, installation: Path) -> None:
    """Remove installations, projects and contents that were not used for long. `installation` is this one."""
    with suppress(OSError):
        if _age(cache / STAMP) < INTERVAL:
            return
        (cache / STAMP).touch()
        deadline = time.monotonic() + PATIENCE
        for path in _unused(cache, installation):
            _remove(path, cache)
            if time.monotonic() > deadline:
                return


def _unused(cache: Path, installation: Path) -> Iterator[Path]:
    open_paths = _open_paths()
    for complete in cache.glob(f"*/{COMPLETE}"):
        folder = complete.parent
        if folder != installation and _age(complete) > UNUSED and not _is_open(folder, open_paths):
            yield folder
    for folder in (cache / CODE).glob("[!.]*"):
        # Some jobs run in the sent project itself, today or in weeks.
        if (
            _age(folder) > UNUSED
            and not (folder / KEPT).exists()
            and not _is_open(folder, open_paths)
        ):
            yield folder
    yield from (path for path in (cache / SUBMISSIONS).glob("*") if _age(path) > REMEMBERED)
    for path in (cache / OBJECTS).glob("??/*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_nlink == 1 and time.time() - status.st_mtime > UNUSED:  # no project has it
                yield path


def _remove(path: Path, cache: Path) -> None:
    """Remove a file or a folder. A folder loses its name first: what is half removed is not used."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        gone = (
            cache / CODE if path.parent.name == CODE else cache
        ) / f"{PARTIAL}{os.urandom(6).hex()}"
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _open_paths() -> set[str]:
    """Return what this user's processes on this machine have as program arguments or current folder."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.update(
                os.fsdecode(part) for part in (process / "cmdline").read_bytes().split(b"\0")
            )
            found.add(os.readlink(process / "cwd"))
    return found


def _is_open(folder: Path, paths: set[str]) -> bool:
    return any(path == str(folder) or path.startswith(f"{folder}/") for path in paths)


def _age(path: Path) -> float:
    """Return the seconds since a file was changed; many if there is none."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")
