"""The cache: staged data that stays on a node for later jobs (`keep`), one folder per content with
a lock beside it.

The job that stages holds the lock exclusively; jobs that use the data share it. Data that nobody
uses expires; if space is short, `stager` removes it earlier. The kernel releases the locks of a
killed process.
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

from paceline.contract.files import open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.staging.copy import remove_tree

POLL_INTERVAL = 0.2  # seconds
CACHE = "cache"  # below the user's private folder on the node
COMPLETE = "complete.json"


class Lock:
    """A lock file that may be removed by whoever holds it exclusively."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1

    def acquire(self, *, exclusive: bool) -> bool:
        """Take the lock without waiting. Returns False if another process holds it."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        while True:
            descriptor = open_own_file(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            # The file may have been removed and made again between the two calls.
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == os.stat(self.path).st_ino:
                    self.descriptor = descriptor
                    return True
            os.close(descriptor)

    def share(self) -> None:
        """Let others use the data too; this is its last use so far."""
        os.utime(self.descriptor)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class CachedItem:
    """One content in the cache of this node."""

    path: Path  # cache/<key>

    def target(self, source: str) -> Path:
        """Return where a copy of the source is, under its own name."""
        return self.path / "content" / (os.path.basename(source) or "data")

    @property
    def reason(self) -> str:
        return f"cached copy of {self.read_record()[1]}"

    @property
    def is_complete(self) -> bool:
        return (self.path / COMPLETE).exists()

    def lock(self) -> Lock:
        return Lock(self.path.with_name(f"{self.path.name}.lock"))

    def finish(self, *, keep: float, source: str) -> None:
        record = json.dumps({"keep": keep, "source": source})
        write_atomically(self.path / COMPLETE, record, mode=0o600)

    def read_record(self) -> tuple[float, str]:
        """Return how long to keep the item after its last use, and its source."""
        try:
            record = json.loads((self.path / COMPLETE).read_text(encoding="utf-8"))
            return float(record["keep"]), str(record["source"])
        except (OSError, ValueError, KeyError):
            return 86400.0, "unfinished"  # another job may be filling it

    def last_use(self) -> float:
        path = self.lock().path
        try:
            return (path if path.exists() else self.path).stat().st_mtime
        except OSError:
            return time.time()  # another process is removing it

    def is_expired(self, now: float) -> bool:
        return now - self.last_use() > self.read_record()[0]

    def remove(self) -> bool:
        """Remove the item unless somebody uses it."""
        lock = self.lock()
        if not lock.acquire(exclusive=True):
            return False
        try:
            is_gone = remove_tree(self.path)
            if is_gone:
                lock.path.unlink(missing_ok=True)
            return is_gone
        finally:
            lock.close()


def cached_item(private: Path, key: str) -> CachedItem:
    cache = private / CACHE
    cache.mkdir(mode=0o700, exist_ok=True)
    return CachedItem(cache / key)


def cached_items(private: Path) -> list[CachedItem]:
    return [CachedItem(path) for path in sorted(private.glob(f"{CACHE}/*")) if path.is_dir()]


def acquire_item(
    item: CachedItem, *, fill: Callable[[], None], check: Callable[[], None]
) -> tuple[Lock, bool]:
    """Wait until the item is complete. Returns the shared lock that protects it, and whether it was
    there already.

    `fill` is called by one job at a time; `check` may raise an error while another job fills it.
    """
    lock = item.lock()
    while True:
        if item.is_complete and lock.acquire(exclusive=False):
            if CachedItem(item.path).is_complete:
                break
            lock.close()  # it was removed before it was locked
        if lock.acquire(exclusive=True):
            break
        check()
        time.sleep(POLL_INTERVAL)
    try:
        is_reused = item.is_complete  # it may have been removed before it was locked
        if not is_reused:
            remove_tree(item.path)  # what an interrupted job has left
            item.path.mkdir(mode=0o700)
            fill()
        lock.share()
    except BaseException:
        lock.close()
        raise
    return lock, is_reused
