"""The reader on the cluster: sends what changes in run folders, and what the scheduler says, until nobody listens.

It runs on the login node as long as the connection that started it, and keeps nothing there. It checks changing
runs often and others rarely, and uses the scheduler's answer that all of the user's Paceline processes share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.contract.run_path import is_run_path, list_runs_and_sweeps
from paceline.contract.typed_command import to_type
from paceline.errors import ClusterError, PacelineError, UsageError
from paceline.slurm import commands as slurm
from paceline.ssh.mirror.changes import RunChanges
from paceline.ssh.mirror.frames import ALIVE, ERROR, FOUND, JOBS, PASS, Frame, FrameWriter
from paceline.ssh.mirror.job_states import to_row
from paceline.ssh.mirror.run_files import Copy
from paceline.watch.scheduler import Evidence, query_states, read_evidence

INTERVAL = 1.0  # seconds between looks at a run that was named and changes
LIST_INTERVAL = 3.0  # the same for one of a list
QUIET = 120.0  # seconds without a change after which a run is looked at less often
QUIET_INTERVAL, QUIET_LIST_INTERVAL = 5.0, 30.0
SCAN_INTERVAL = 10.0  # seconds between looks for new runs
IDLE_SHARE = 10  # a pass is followed by a pause of so many times its CPU time
SILENCE = 60.0  # seconds without a word after which this machine's side calls a connection dead
MAX_RUNS = 500  # of a list, with the trials of its sweeps
MAX_TRIALS = 50  # of a sweep in a list; one that was named comes whole
MAX_LINE = 64 << 20  # bytes of what the other side sends

Find = Callable[[str], Path]


@dataclass(frozen=True)
class Scope:
    """What to watch: runs and sweeps by name, the newest ones, or those that the mirror knows."""

    names: list[str] = field(default_factory=list)
    newest: int = 0
    # their paths in the scratch folder; they may be gone
    known: list[str] = field(default_factory=list)
    logs: bool = True
    follow: bool = False
    log_bytes: int = 1 << 20  # of each log at first
    # the reader waits half as long again, and says that it is alive six times meanwhile
    silence: float = SILENCE

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes | str) -> Scope:
        return cls(**json.loads(text))


class Reader:
    """Sends changes to a stream. `find` returns the folder that a name means."""

    def __init__(self, scratch: Path, find: Find, source: IO[bytes], sink: IO[bytes]) -> None:
        self._scratch, self._find, self._source, self._writer = (
            scratch,
            find,
            source,
            FrameWriter(sink),
        )
        self._copies: dict[str, dict[str, Copy]] = {}
        self._runs: dict[str, RunChanges] = {}
        self._due: dict[str, float] = {}
        self._changed: dict[str, float] = {}  # when each run last changed, by our clock
        self._jobs: dict[str, Any] = {}  # as they were sent
        self._problem: str | None = None
        self._unanswered: dict[str, Evidence] = {}  # jobs that the scheduler did not answer for
        self._has_passed = False
        self._left_out = 0  # trials of a list that do not come
        self._next_scan = 0.0
        self._sent = time.monotonic()

    def serve(self) -> int:
        """Answer one request; return an exit code."""
        scope = Scope.from_json(self._source.readline(MAX_LINE))
        try:
            found = {name: self._relative(self._find(name)) for name in scope.names}
        except PacelineError as problem:
            self._send(Frame(ERROR, {"message": problem.message, "hint": problem.hint}))
            return 0
        runs = self._list(scope, found.values())
        about = {
            "scratch": str(self._scratch),
            "names": found,
            "runs": runs,
            "left_out": self._left_out,
        }
        self._send(Frame(FOUND, {**about, "time": time.time()}))
        while (line := self._source.readline(MAX_LINE)).isspace():
            # empty lines say that somebody listens; a busy node may start so slowly that some came already
            pass
        if not line:
            return 0
        self._read_copies(json.loads(line))
        threading.Thread(target=self._listen, args=(1.5 * scope.silence,), daemon=True).start()
        self._watch(runs, scope)
        if not scope.follow:
            self._pass(scope)
            return 0
        while True:
            began = time.thread_time()
            if time.monotonic() >= self._next_scan:
                if removed := next(filter(self._is_removed, found.values()), ""):
                    hint = f"See which runs there are: {to_type('ps')}"
                    self._send(
                        Frame(
                            ERROR,
                            {"message": f"{self._scratch / removed} was removed.", "hint": hint},
                        )
                    )
                    return 0
                self._watch(self._list(scope, found.values()), scope)
            self._pass(scope)
            time.sleep(
                max(
                    INTERVAL if scope.names else LIST_INTERVAL,
                    IDLE_SHARE * (time.thread_time() - began),
                )
            )

    # -- what to watch ---------------------------------------------------------------------------------

    def _relative(self, folder: Path) -> str:
        """Return the path of a run in the scratch folder. Raises PacelineError if it is elsewhere."""
        with suppress(ValueError):
            path = folder.resolve().relative_to(self._scratch.resolve()).as_posix()
            if is_run_path(path):
                return path
        raise UsageError(
            f"{folder} is not in {self._scratch}.",
            hint="Only runs in your scratch folder are watched.",
        )

    def _list(self, scope: Scope, named: Collection[str]) -> list[str]:
        """Return the runs to watch, the newest first. Those of a sweep belong to it."""
        self._next_scan = time.monotonic() + SCAN_INTERVAL
        wanted, self._left_out = [*named, *filter(is_run_path, scope.known)], 0
        if scope.newest:
            runs, sweeps = list_runs_and_sweeps(self._scratch)
            ages = {path: path.rpartition("/")[2] for path in runs} | {
                path: _begun(path) for path in sweeps
            }
            newest = sorted(ages, key=ages.__getitem__, reverse=True)
            wanted += [os.path.relpath(path, self._scratch) for path in newest[: scope.newest]]
        room = max(0, MAX_RUNS - len(wanted))  # for trials of a list
        found: dict[str, None] = {}
        for path in wanted:
            trials = [f"{path}/{TRIALS}/{number}" for number in self._trials(path)]
            if not named:
                kept = trials[: min(MAX_TRIALS, room)]
                self._left_out += len(trials) - len(kept)
                room, trials = room - len(kept), kept
            found |= dict.fromkeys(filter(is_run_path, (path, *trials)))
        return list(found)

    def _trials(self, path: str) -> list[str]:
        """Return the numbers of a sweep's trials, from the last one."""
        names = _names(self._scratch / path / TRIALS)
        return sorted((name for name in names if name.isdecimal()), key=int, reverse=True)

    def _is_removed(self, run: str) -> bool:
        try:
            os.lstat(self._scratch / run)
        except FileNotFoundError:
            return True
        except OSError:
            pass  # it cannot be read now
        return False

    def _read_copies(self, table: dict[str, dict[str, Any]]) -> None:
        self._copies = {
            run: {path: Copy(*map(int, row)) for path, row in files.items()}
            for run, files in table.items()
        }

    def _watch(self, runs: Iterable[str], scope: Scope) -> None:
        for run in runs:
            if run not in self._runs:
                copies = self._copies.pop(run, {})
                self._runs[run] = RunChanges(
                    self._scratch, run, copies, scope.log_bytes, logs=scope.logs
                )
                self._due[run] = 0.0

    # -- what to send ----------------------------------------------------------------------------------

    def _pass(self, scope: Scope) -> None:
        """Send what has changed in runs, and what the scheduler says of them: asked before, sent after."""
        now = time.monotonic()
        due = [run for run in self._runs if now >= self._due[run]]
        jobs, sent = self._query_jobs(due), 0
        for run in due:
            for frame in self._runs[run].collect():
                self._send(frame)
                self._changed[run] = time.monotonic()
                sent += 1
            is_quiet = now - self._changed.get(run, 0.0) > QUIET
            self._due[run] = now + (
                (QUIET_INTERVAL if scope.names else QUIET_LIST_INTERVAL) if is_quiet else 0.0
            )
        if jobs is not None:
            self._send(jobs)
            sent += 1
        if sent or not self._has_passed:
            self._has_passed = True
            self._send(Frame(PASS, {"time": time.time()}))
        elif time.monotonic() - self._sent > scope.silence / 6:
            self._send(Frame(ALIVE, {"time": time.time()}))

    def _query_jobs(self, runs: Iterable[str]) -> Frame | None:
        """Return what the scheduler says about the jobs of runs, as far as it is new.

        A scheduler that did not answer is asked for the same jobs again, whichever runs are due: nobody asks it for
        runs that have no job, or are over, so they do not show that it answers again.
        """
        folders = [RunFolder(self._scratch / run) for run in runs]
        found = read_evidence(
            (each, job) for each in folders if (job := slurm.read_job_id(each)) is not None
        )
        seen = self._unanswered | found
        if not seen:
            return None
        rows, problem, hint = {}, "", ""
        try:
            states = query_states(seen)
            rows, self._unanswered = {job: to_row(states.get(job)) for job in seen}, {}
        except ClusterError as error:
            problem, hint = error.message, error.hint
            self._unanswered = {job: each for job, each in seen.items() if not each.is_closed}
        new = {
            job: row for job, row in rows.items() if job not in self._jobs or self._jobs[job] != row
        }
        if not new and problem == self._problem:
            return None
        self._jobs |= new
        self._problem = problem
        return Frame(JOBS, {"jobs": new, "problem": problem, "hint": hint})

    def _send(self, frame: Frame) -> None:
        self._writer.write(frame)
        self._sent = time.monotonic()

    # -- who listens -----------------------------------------------------------------------------------

    def _listen(self, timeout: float) -> None:
        """End this process when the other side is gone, or silent for long: a dead link may look alive for hours."""
        heard = [time.monotonic()]

        def check() -> None:
            while time.monotonic() - heard[0] < timeout:
                time.sleep(timeout / 18)
            os._exit(0)

        threading.Thread(target=check, daemon=True).start()
        while self._source.readline(100):
            heard[0] = time.monotonic()
        os._exit(0)


def _begun(sweep: str) -> str:
    """Return when a sweep began, as the ids of runs tell it."""
    try:
        began = os.stat(f"{sweep}/sweep.json").st_mtime
    except OSError:
        began = 0.0
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def serve(scratch: Path, find: Find) -> int:
    """Serve whoever is at the other end of stdin and stdout."""
    with suppress(OSError):
        os.nice(5)
    try:
        return Reader(scratch, find, sys.stdin.buffer, sys.stdout.buffer).serve()
    except BrokenPipeError:
        os._exit(0)
