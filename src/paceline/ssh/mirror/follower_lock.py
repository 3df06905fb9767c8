"""The lock of those who follow runs: one process receives them, and others that follow the same read what it writes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.contract.files.foreign_records import read_object
from paceline.contract.files.shared_folders import open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.ssh.mirror.reader import Scope

HEARTBEAT_INTERVAL = 1.0  # seconds between signs of life


class FollowerLock:
    """The right to follow these runs, held by a lock that ends with the process.

    A process that is stopped keeps the lock: whoever holds it sets the time of the file again and again.
    """

    def __init__(self, folder: Path, scope: Scope, found: Mapping[str, str]) -> None:
        what = json.dumps([scope.newest, scope.log_bytes, sorted(found.values())])
        name = f"following-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        self._notice = folder / f"{name}.json"
        self._descriptor = open_own_file(folder / name, os.O_RDWR | os.O_CREAT)
        self._is_taken = False
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._live, name="paceline-follower-lock", daemon=True
        )

    def take(self) -> bool:
        """Return whether this process holds the lock, now or already."""
        if not self._is_taken:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._is_taken = True
            self._notice.unlink(missing_ok=True)  # of a process that was killed
            self._thread.start()
        return True

    def _live(self) -> None:
        while True:
            with suppress(OSError):
                os.utime(self._descriptor)
            if self._over.wait(HEARTBEAT_INTERVAL):
                return

    def read_heartbeat(self) -> int:
        """Return the last sign of life of whoever holds the lock: another one each time."""
        return os.fstat(self._descriptor).st_mtime_ns

    def tell(self, lost: float | None) -> None:
        """Tell others that the runs are here, and since when the connection is lost."""
        with suppress(OSError):
            if self._is_taken:
                write_atomically(self._notice, json.dumps({"lost": lost}), mode=0o600)

    def listen(self) -> tuple[bool, float | None]:
        """Return whether the runs are here, and since when whoever follows them has no connection."""
        with suppress(OSError, ValueError, TypeError):
            lost = read_object(self._notice).get("lost")
            return True, None if lost is None else float(lost)
        return False, None

    def end(self) -> None:
        if self._is_taken:
            self._over.set()
            self._thread.join()
            with suppress(OSError):
                self._notice.unlink(missing_ok=True)
        os.close(self._descriptor)
