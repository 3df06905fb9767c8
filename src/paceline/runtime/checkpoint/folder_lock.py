"""The lock on a checkpoint folder: two live runs that write into one folder would remove each
other's checkpoints.

A file says who holds it, and counts up every few seconds. On the same host, the lock ends with its
process. On another host, it ends when the holder's counter stops. File locks of the kernel are not
used: many clusters disable them on shared disks. Before each commit, it is also checked that this
job start still has the claim on the run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.contract import env
from paceline.contract.claims import find_successor
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, TakenOver

FILE = ".in-use"
SIZE = 2048  # bytes of the description; the count follows it
INTERVAL = 5.0  # seconds between two counts
TAKEN_OVER_HINT = "This process was cut off or paused and presumed dead. The other one continues."
PATIENCE = 4  # intervals without a new count, after which a holder on another host counts as gone


@dataclass(frozen=True)
class Holder:
    """Who holds a folder."""

    host: str
    pid: int
    started: str  # when the process started, as the kernel counts; a pid may be used again
    system: str  # the boot and the pid namespace in which the pid has a meaning
    owner: str  # the run or job, if known; its attempts follow each other
    attempt: int
    since: float
    token: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


def this_process(attempt: int, environ: Mapping[str, str] = os.environ) -> Holder:
    """Return this process as a holder."""
    owner = environ.get(env.RUN, "")
    if not owner and environ.get("SLURM_JOB_ID"):
        owner, attempt = (
            f"job {environ['SLURM_JOB_ID']}",
            int(environ.get("SLURM_RESTART_COUNT") or 0),
        )
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_start_of(os.getpid()) or "",
        system=_system(),
        owner=owner,
        attempt=attempt,
        since=time.time(),
        token=secrets.token_hex(8),
    )


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return when a process started, "" if it has ended, and None if the kernel doesn't tell."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _is_running(holder: Holder) -> bool:
    """Return whether the process of a holder on this host is still there."""
    started = _start_of(holder.pid)
    if started is not None:
        return started != "" and started == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to somebody else
    return True


class FolderLock:
    """Holds a folder for this process, from `acquire` to `release`. Only rank 0 has one."""

    def __init__(
        self, folder: Path, *, attempt: int, warn: Callable[[str], None], interval: float = INTERVAL
    ) -> None:
        self.path = folder / FILE
        self.me = this_process(attempt)
        self._warn, self._interval = warn, interval
        self._descriptor = -1
        self._made_folder = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the folder. Raises CheckpointError if another live run has it, or another job start
        has this run.

        A folder that can't be written is not locked: saving there fails, and says so.
        """
        check_claim()
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(parents=True)
                self._made_folder = True
            while not self._create():
                self._remove_stale()
        except OSError:
            return
        self._thread = threading.Thread(
            target=self._count, name="paceline-folder-lock", daemon=True
        )
        self._thread.start()

    def _create(self) -> bool:
        """Write the file, complete from the first moment, unless there is one."""
        partial = self.path.with_name(f"{FILE}.{self.me.token}")
        text = json.dumps(asdict(self.me)).ljust(SIZE) + f"{0:020d}"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            os.link(partial, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if self.path.exists():
                return False
            os.rename(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY)
        return True

    def _remove_stale(self) -> None:
        """Remove the file if its holder is gone. Raises CheckpointError if it is alive."""
        found = _read(self.path)
        if found is None:
            # Not a description: of another version, or being removed.
            self._discard("")
            return
        holder, _ = found
        if self._is_alive(*found):
            raise CheckpointError(
                f"Another run is using {self.path.parent}: {holder}.",
                hint="Stop that run, or use a different folder for this one. To start from its "
                "checkpoints, use "
                f"start_from. If that run no longer exists, remove {self.path}.",
            )
        self._discard(holder.token)

    def _is_alive(self, holder: Holder, count: str) -> bool:
        me = self.me
        if (holder.system, holder.host, holder.pid, holder.started) == (
            me.system,
            me.host,
            me.pid,
            me.started,
        ):
            return False  # an earlier session of this process
        if holder.owner and holder.owner == me.owner and holder.attempt < me.attempt:
            return False  # an earlier attempt of this run, which has ended before this one began
        if holder.system == me.system and holder.host == me.host:
            return _is_running(holder)
        self._warn(f"{self.path.parent} was used by {holder}; waiting to see whether it still is")
        for _ in range(PATIENCE):
            time.sleep(self._interval)
            now = _read(self.path)
            if now is None or now[0].token != holder.token:
                return False  # it has just left; `acquire` looks again
            if now[1] != count:
                return True
        return False

    def _discard(self, token: str) -> None:
        """Remove the file of a stale holder, but not one that somebody has created since."""
        aside = self.path.with_name(f"{FILE}.{self.me.token}.stale")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        found = _read(aside)
        if found is not None and found[0].token != token:
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def _count(self) -> None:
        count = 0
        while not self._ended.wait(self._interval):
            count += 1
            # the disk may be away for a while, or the file replaced
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, f"{count:020d}".encode(), SIZE)
                os.fsync(self._descriptor)  # other hosts see it now, not when the cache is written

    def check(self) -> None:
        """Raise TakenOver if another start of this run, or another run, has the folder: this one
        was taken for dead.
        """
        check_claim()
        found = _read(self.path) if self._thread is not None else None
        if found is not None and found[0].token != self.me.token:
            raise TakenOver(
                f"Another run has taken over {self.path.parent}: {found[0]}.", hint=TAKEN_OVER_HINT
            )

    def release(self) -> None:
        """Give the folder back."""
        if self._thread is None or os.getpid() != self.me.pid:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        os.close(self._descriptor)
        found = _read(self.path)
        with contextlib.suppress(OSError):
            if found is not None and found[0].token == self.me.token:
                self.path.unlink()
            if self._made_folder:
                self.path.parent.rmdir()  # fails if there are checkpoints in it


def check_claim(environ: Mapping[str, str] = os.environ) -> None:
    """Raise TakenOver if another job start has the run folder: this one was cut off, and the run
    goes on elsewhere.
    """
    run, job_start = environ.get(env.RUN), environ.get(env.JOB_START)
    if not run or not job_start:
        return
    successor = find_successor(RunFolder(Path(run)), job_start)
    if successor:
        raise TakenOver(
            f"Job start {job_start} no longer has run {Path(run).name}: job start {successor} has "
            "taken over.",
            hint=TAKEN_OVER_HINT,
        )


def _read(path: Path) -> tuple[Holder, str] | None:
    """Return the holder and its count; None if there is no file, or none that this version
    writes.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return Holder(**json.loads(text[:SIZE])), text[SIZE:]
    except (OSError, ValueError, TypeError):
        return None
