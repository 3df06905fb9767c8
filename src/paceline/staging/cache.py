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

from paceline.contract.files.shared_folders import open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.staging.copy.transfer import Stopped
from paceline.staging.folders import remove_tree

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
        while True:
            descriptor = open_own_file(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(
                    descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
                )
            except OSError:
                os.close(descriptor)
                return False
            # The file may have been removed and made again between the two calls.
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == os.stat(self.path).st_ino:
                    self.descriptor = descriptor
                    return True
            os.close(descriptor)

    def downgrade(self) -> None:
        """Turn an exclusive lock into a shared one."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def touch(self) -> None:
        os.utime(self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class CachedItem:
    """One content in the cache of this node."""

    folder: Path  # cache/<key>

    @property
    def content(self) -> Path:
        return self.folder / "content"

    @property
    def partial(self) -> Path:
        return self.folder / "partial"

    def is_complete(self) -> bool:
        return (self.folder / COMPLETE).exists()

    def lock(self) -> Lock:
        return Lock(self.folder.with_name(f"{self.folder.name}.lock"))

    def finish(self, *, keep: float, source: str, size: int) -> None:
        os.replace(self.partial, self.content)
        record = json.dumps({"keep": keep, "source": source, "size": size})
        write_atomically(self.folder / COMPLETE, record, mode=0o600)

    def read_record(self) -> tuple[float, str]:
        """Return how long to keep the item after its last use, and its source."""
        try:
            record = json.loads((self.folder / COMPLETE).read_text(encoding="utf-8"))
            return float(record["keep"]), str(record["source"])
        except (OSError, ValueError, KeyError, TypeError):
            return 86400.0, "unfinished"  # another job may resume it within a day

    def is_expired(self, now: float) -> bool:
        lock = self.lock().path
        try:
            used = (lock if lock.exists() else self.folder).stat().st_mtime
        except OSError:
            return False
        return now - used > self.read_record()[0]

    def last_use(self) -> float:
        try:
            return self.lock().path.stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> bool:
        """Remove the item unless somebody uses it."""
        lock = self.lock()
        if not lock.acquire(exclusive=True):
            return False
        try:
            is_gone = remove_tree(self.folder)
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
    cache = private / CACHE
    if not cache.is_dir():
        return []
    return [CachedItem(path) for path in sorted(cache.iterdir()) if path.is_dir()]


def acquire_item(
    item: CachedItem, *, stage: Callable[[Path, bool], None], is_stopped: Callable[[], bool]
) -> tuple[Lock, bool]:
    """Wait until the item is complete. Returns the shared lock that protects it, and whether it was
    there already.

    `stage` fills a folder (True: parts of it may exist) and is called by one job at a time.
    """
    lock = item.lock()
    while True:
        if item.is_complete() and lock.acquire(exclusive=False):
            if item.is_complete():  # it may have been removed before it was locked
                lock.touch()
                return lock, True
            lock.close()
        if lock.acquire(exclusive=True):
            break
        if is_stopped():
            raise Stopped
        time.sleep(POLL_INTERVAL)  # another job stages it
    try:
        is_cached = item.is_complete()
        if not is_cached:
            if item.content.exists() and not item.partial.exists():
                # The last job could not write the record: its disk was full, or it was killed.
                os.replace(item.content, item.partial)
            resumes = item.partial.exists()
            item.partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            stage(item.partial, resumes)
        lock.touch()
        lock.downgrade()
    except BaseException:
        lock.close()
        raise
    return lock, is_cached
