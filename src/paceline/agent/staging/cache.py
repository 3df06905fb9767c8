"""Staged data that stays on a node for later jobs (`keep`): one folder per content, with a lock beside it.

Who stages holds the lock alone; who uses the data shares it; what nobody holds and has not been used for its time
goes. Locks are the kernel's own: a process that is killed lets go of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.staging.copy.transfer import Stopped
from paceline.agent.staging.folders import remove_tree
from paceline.contract.run_folder import write_atomically

LOOK_EVERY = 0.2  # seconds


class Lock:
    """A lock file that may be removed by whoever holds it alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = -1

    def take(self, *, alone: bool) -> bool:
        """Without waiting; False when somebody else holds it."""
        while True:
            number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(number, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except OSError:
                os.close(number)
                return False
            # The file may have been removed, and made again, between the two calls.
            with suppress(OSError):
                if os.fstat(number).st_ino == os.stat(self.path).st_ino:
                    self.number = number
                    return True
            os.close(number)

    def share(self) -> None:
        """From alone to shared."""
        fcntl.flock(self.number, fcntl.LOCK_SH)

    def touch(self) -> None:
        os.utime(self.number)

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


@dataclass(frozen=True)
class CachedItem:
    """One content on this node."""

    folder: Path  # kept/<key>

    @property
    def content(self) -> Path:
        return self.folder / "content"

    @property
    def partial(self) -> Path:
        return self.folder / "partial"

    def is_whole(self) -> bool:
        return (self.folder / "kept.json").exists()

    def lock(self) -> Lock:
        return Lock(self.folder.with_name(f"{self.folder.name}.lock"))

    def finish(self, *, keep: float, source: str, size: int) -> None:
        os.replace(self.partial, self.content)
        write_atomically(
            self.folder / "kept.json", json.dumps({"keep": keep, "source": source, "size": size}), mode=0o600
        )

    def about(self) -> tuple[float, str]:
        """For how long it is kept after its last use, and what it is a copy of."""
        try:
            value = json.loads((self.folder / "kept.json").read_text(encoding="utf-8"))
            return float(value["keep"]), str(value["source"])
        except (OSError, ValueError, KeyError, TypeError):
            return 86400.0, "unfinished"  # a day to go on with it

    def is_expired(self, now: float) -> bool:
        lock = self.lock().path
        try:
            used = (lock if lock.exists() else self.folder).stat().st_mtime
        except OSError:
            return False
        return now - used > self.about()[0]

    def remove(self) -> bool:
        """If nobody uses it."""
        lock = self.lock()
        if not lock.take(alone=True):
            return False
        try:
            gone = remove_tree(self.folder)
            if gone:
                lock.path.unlink(missing_ok=True)
            return gone
        finally:
            lock.close()


def cached_item(private: Path, key: str) -> CachedItem:
    kept = private / "kept"
    kept.mkdir(mode=0o700, exist_ok=True)
    return CachedItem(kept / key)


def cached_items(private: Path) -> list[CachedItem]:
    kept = private / "kept"
    if not kept.is_dir():
        return []
    return [CachedItem(path) for path in sorted(kept.iterdir()) if path.is_dir()]


def obtain(
    item: CachedItem, *, stage: Callable[[Path, bool], None], stopped: Callable[[], bool]
) -> tuple[Lock, bool]:
    """The item whole, and the shared lock that holds it; whether it was there already.

    `stage` fills a folder (True: something of it may be there from before) and is called by one job at a time.
    """
    lock = item.lock()
    while True:
        if item.is_whole() and lock.take(alone=False):
            if item.is_whole():  # still: it may have been removed before it was locked
                lock.touch()
                return lock, True
            lock.close()
        if lock.take(alone=True):
            break
        if stopped():
            raise Stopped
        time.sleep(LOOK_EVERY)  # somebody else is at it
    try:
        found = item.is_whole()
        if not found:
            if item.content.exists() and not item.partial.exists():
                os.replace(
                    item.content, item.partial
                )  # its end was not written: the disk was full, or it was killed
            resumes = item.partial.exists()
            item.partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            stage(item.partial, resumes)
        lock.touch()
        lock.share()
    except BaseException:
        lock.close()
        raise
    return lock, found
