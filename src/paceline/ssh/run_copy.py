"""A copy of the newest runs of a cluster on this machine, laid out like its scratch folder.

The login node prints what has changed as lines of JSON, as long as somebody reads them, and keeps
nothing there; rsync brings it. Code, checkpoints and secrets are not among it. One process at a time
follows a copy; others that show it read what that one writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import TRIALS, RunFolder, write_atomically
from paceline.errors import ClusterError, ConnectionProblem, EnvironmentProblem, PacelineError
from paceline.slurm import commands as slurm
from paceline.spec.run_path import is_run_path
from paceline.ssh.connection import Connection, new_mark, print_mark
from paceline.ssh.rsync import Route
from paceline.watch.log_file import skipped_path
from paceline.watch.origin import NEWS, STATES, state_row
from paceline.watch.records import newest_first
from paceline.watch.scheduler import query_states, read_evidence

# -- on the cluster: what has changed --------------------------------------------------------------


INTERVAL = 3.0  # seconds between looks at runs that change
QUIET, QUIET_INTERVAL = 120.0, 30.0  # seconds without a change, after which a look is rare
SCAN_INTERVAL = 10.0  # seconds between looks for new runs
IDLE_SHARE = 10  # a look is followed by a pause of so many times its CPU time
NEWEST = 100  # runs and sweeps
MAX_TRIALS, MAX_RUNS = 50, 500  # trials of each sweep, and runs with them
MAX_RECORD = 4 << 20  # bytes; a larger file that does not grow is left out
GROWING = (".log", ".jsonl", ".times", ".journal")
# of checkpoints, only the marker
VIEWED = re.compile(
    r"[\w-]+\.(json|jsonl|journal|log|sbatch)|job|requeues|cancelled|pruned"
    r"|(events|system|chosen|job-starts/[^/]+)/[\w-]+(\.jsonl?)?|claims/\d+|checkpoints/step-\d+/complete\.json"
    r"|attempt-\d+/(start|verdict|summary\.json|failure\.json|(error|stacks|rank|node)-\d+\.\w+)"
)
FOLDERS = re.compile(
    r"events|system|chosen|claims|attempt-\d+|job-starts(/[^/]+)?|checkpoints(/step-\d+)?"
)

Row = list[Any]  # a file's size, its time of change and its inode; of a link, its target
Files = dict[str, Row]


def is_growing(path: str) -> bool:
    return path.endswith(GROWING)


def list_files(folder: Path) -> Files:
    """Return the files of a run that views read. Of links, only claims are among them."""
    found: Files = {}
    for parent, folders, names in os.walk(folder):
        prefix = "" if parent == str(folder) else f"{os.path.relpath(parent, folder)}/"
        folders[:] = [name for name in folders if FOLDERS.fullmatch(prefix + name)]
        for name in filter(VIEWED.fullmatch, (prefix + name for name in names)):
            try:
                status = os.lstat(folder / name)
                if stat.S_ISLNK(status.st_mode) and prefix == "claims/":
                    found[name] = [os.readlink(folder / name)]
            except OSError:  # it has just gone
                continue
            if stat.S_ISREG(status.st_mode) and (is_growing(name) or status.st_size <= MAX_RECORD):
                found[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


class RunList:
    """The newest runs of a scratch folder, or one run or sweep of it with all its trials."""

    def __init__(self, scratch: Path, named: Path | None = None) -> None:
        self._scratch, self._named = scratch, named
        self._runs: list[str] = []
        self._files: dict[str, Files] = {}
        self._changed: dict[str, float] = {}
        self._looked: dict[str, float] = {}
        self._next_scan = 0.0

    def read_news(self) -> dict[str, Any]:
        """Return what has changed since the last time.

        Slurm is asked before the files are listed, and they are copied later: what a run had
        written before its verdict is then complete.
        """
        now = time.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + SCAN_INTERVAL
            self._runs = self._find_runs()
        due = [run for run in self._runs if self._is_due(run, now)]
        news: dict[str, Any] = {"runs": self._runs, **self._ask_slurm(due), "files": {}}
        for run in due:
            self._looked[run] = now
            found = list_files(self._scratch / run)
            if found and found != self._files.get(run):  # none: it cannot be read now
                self._files[run] = news["files"][run] = found
                self._changed[run] = now
        about = {"scratch": str(self._scratch), "rsync": shutil.which("rsync") or ""}
        return {**news, **about, "time": time.time()}

    def _is_due(self, run: str, now: float) -> bool:
        is_quiet = now - self._changed.get(run, now) > QUIET
        return not is_quiet or now - self._looked[run] > QUIET_INTERVAL

    def _find_runs(self) -> list[str]:
        """Return the paths of runs, sweeps and trials in the scratch folder, the newest first."""
        if self._named is not None:
            wanted = [self._named.resolve().relative_to(self._scratch.resolve()).as_posix()]
        else:
            newest = newest_first(self._scratch)[:NEWEST]
            wanted = [os.path.relpath(path, self._scratch) for path in newest]
        found: list[str] = []
        for path in wanted:
            numbers = (each.name for each in (self._scratch / path / TRIALS).glob("*"))
            trials = sorted(filter(str.isdecimal, numbers), key=int, reverse=True)
            if self._named is None:
                trials = trials[: min(MAX_TRIALS, max(0, MAX_RUNS - len(found)))]
            found += [path, *(f"{path}/{TRIALS}/{number}" for number in trials)]
        return [path for path in found if is_run_path(path)]

    def _ask_slurm(self, runs: Sequence[str]) -> dict[str, Any]:
        folders = [RunFolder(self._scratch / run) for run in runs]
        jobs = ((each, job) for each in folders if (job := slurm.read_job_id(each)) is not None)
        seen = read_evidence(jobs)
        try:
            states = query_states(seen)
        except ClusterError as problem:
            return {"jobs": {}, "problem": problem.message, "hint": problem.hint}
        rows = {job: state_row(states.get(job)) for job in seen}
        return {"jobs": rows, "problem": "", "hint": ""}


def print_news(scratch: Path, named: Path | None, *, follow: bool) -> None:
    """Print a line whenever it is due, until nobody reads it any more."""
    found = RunList(scratch, named)
    while True:
        began = time.thread_time()
        print(json.dumps(found.read_news()), flush=True)
        if not follow:
            return
        time.sleep(max(INTERVAL, IDLE_SHARE * (time.thread_time() - began)))


# -- here: the copy --------------------------------------------------------------------------------


FILES = "files.json"  # what the copy has, as the cluster listed it
LITTLE, SOME = 256 << 10, 4 << 20  # bytes of each log that come at first
PAUSE = 5.0  # seconds between tries to connect again

News = Mapping[str, Any]
Connect = Callable[[], AbstractContextManager[tuple[Connection, Iterator[News]]]]


class RunCopy:
    """A folder with the copy, and what is known about it."""

    def __init__(self, base: Path, *, log_bytes: int = LITTLE) -> None:
        self.base, self.folder, self._log_bytes = base, base / "runs", log_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(base, 0o700)
        self._files: dict[str, Files] = read_fields(base / FILES)
        self._jobs: dict[str, Any] = {}

    def apply(self, connection: Connection, news: News) -> None:
        """Bring what has changed, and remove runs that are gone or no longer listed."""
        runs = [run for run in news["runs"] if is_run_path(run)]
        listed = {
            run: {path: row for path, row in files.items() if VIEWED.fullmatch(path)}
            for run, files in news["files"].items()
            if is_run_path(run)
        }
        growing, records = list[str](), list[str]()
        for run, files in listed.items():
            before = self._files.get(run, {})
            for path, row in files.items():
                if before.get(path) != row:
                    is_log = is_growing(path)
                    (growing if is_log else records).append(f"{run}/{path}")
                    if is_log:
                        self._prepare(self.folder / run / path, before.get(path), row)
            for path in before.keys() - files.keys():
                (self.folder / run / path).unlink(missing_ok=True)
        route = Route(connection, self.folder, str(news["scratch"]), str(news["rsync"]))
        if growing:
            route.pull(growing, append=True)
        if records:  # verdicts come after what was written before them
            route.pull(records)
        gone = [run for run in self._files if run not in runs]
        for run in gone:
            shutil.rmtree(self.folder / run, ignore_errors=True)
        self._files = {run: files for run, files in self._files.items() if run in runs} | listed
        if listed or gone:
            self._write(FILES, self._files)
        self._jobs |= news["jobs"]
        self._write(STATES, {"jobs": self._jobs, "problem": news["problem"], "hint": news["hint"]})
        self.hear(there=news["time"], scratch=news["scratch"])

    def hear(self, **about: Any) -> None:
        """Note that the cluster has just been heard of."""
        self._write(NEWS, {**about, "here": time.time(), "problem": ""})

    def note(self, problem: str) -> None:
        """Note why nothing new comes."""
        self._write(NEWS, {**read_fields(self.base / NEWS), "problem": problem})

    def _prepare(self, path: Path, before: Any, row: list[int]) -> None:
        """Let a file grow from where it ends here. A new log begins with a hole."""
        size, _, inode = row
        is_same = before is not None and before[2] == inode and path.exists()
        if is_same and path.stat().st_size <= size:
            return
        path.unlink(missing_ok=True)
        skipped_path(path).unlink(missing_ok=True)
        hole = size - self._log_bytes
        if path.suffix == ".log" and hole > 0:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            skipped_path(path).write_text(str(hole), encoding="ascii")
            with open(path, "wb") as file:
                file.truncate(hole)

    def _write(self, name: str, table: Mapping[str, Any]) -> None:
        write_atomically(self.base / name, json.dumps(table), mode=0o600)


class Follower(threading.Thread):
    """Follows runs in the background, and connects again after the connection was lost.

    `say` gets a line when that happens, and when it is back.
    """

    def __init__(self, base: Path, connect: Connect, *, cluster: str, say: Callable[[str], None]):
        super().__init__(name="paceline-follower", daemon=True)
        self._base, self._connect, self._cluster, self._say = base, connect, cluster, say
        self._ready = threading.Event()
        self._problem: PacelineError | None = None

    def begin(self) -> None:
        """Start, and wait until the first news have come. Raises what prevents that."""
        self.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem

    def run(self) -> None:
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._base / "follower", "w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._ready.set()  # another process follows: this one takes over when it ends
                fcntl.flock(lock, fcntl.LOCK_EX)
            copy, is_lost = RunCopy(self._base), False
            while True:
                problem: PacelineError = ConnectionProblem(f"no connection to {self._cluster}")
                try:
                    with self._connect() as (connection, lines):
                        for news in lines:
                            copy.apply(connection, news)
                            if is_lost:
                                self._say(f"connected to {self._cluster} again")
                            is_lost = False
                            self._ready.set()
                except PacelineError as error:
                    problem = error
                except OSError as error:
                    problem = EnvironmentProblem(f"The copy of the runs cannot be written: {error}")
                if not self._ready.is_set():
                    self._problem = problem
                    self._ready.set()
                    return
                if not is_lost:
                    is_lost, said = True, problem.message.rstrip(".")
                    if isinstance(problem, ConnectionProblem):
                        since = time.strftime("%H:%M")
                        said = f"no connection to {self._cluster} since {since}"
                    copy.note(said)
                    self._say(f"{said}. To connect: paceline login {self._cluster}")
                time.sleep(PAUSE)


def parse_lines(lines: Iterable[bytes]) -> Iterator[News]:
    """Yield the news that a cluster prints, one object in each line."""
    for line in lines:
        if not line.endswith(b"\n"):
            return  # the connection was cut
        try:
            news = json.loads(line)
        except ValueError:
            news = None
        if not isinstance(news, dict) or "runs" not in news:
            said = line.decode(errors="replace").strip()[:200]
            raise EnvironmentProblem(f"The cluster's list of runs cannot be read: {said}")
        yield news


class Stream:
    """A command on the login node whose output is read as it comes."""

    def __init__(self, connection: Connection, script: str) -> None:
        self._mark = f"{new_mark()}\n"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            connection.command(f"{print_mark(self._mark.strip())}{script}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C in a terminal is for this process
        )

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self.wait()
        self._errors.close()

    def news(self) -> Iterator[News]:
        """Yield what is printed, without what start-up files print before it."""
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, b"")
        if any(line.endswith(self._mark.encode()) for line in lines):
            yield from parse_lines(lines)

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()

    def errors(self) -> str:
        """Return what the command has complained of."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").rpartition(self._mark)[2]
