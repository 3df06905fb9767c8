"""What has changed in the newest runs of a cluster, as lines of JSON that a laptop's copy follows.

This part runs on the login node, as long as somebody reads it, and keeps nothing there. Each line
names the files that views read and that are new or have changed; rsync brings them. Code,
checkpoints and secrets are not among them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.spec.run_path import is_run_path, list_runs_and_sweeps
from paceline.watch.origin import state_row
from paceline.watch.scheduler import query_states, read_evidence

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
            runs, sweeps = list_runs_and_sweeps(self._scratch)
            ages = {path: path.rpartition("/")[2] for path in runs}
            ages |= {path: _begun(path) for path in sweeps}
            newest = sorted(ages, key=ages.__getitem__, reverse=True)[:NEWEST]
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


def _begun(sweep: str) -> str:
    """Return when a sweep began, as the ids of runs tell it."""
    try:
        began = os.stat(f"{sweep}/sweep.json").st_mtime
    except OSError:
        began = 0.0
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began))


def print_news(scratch: Path, named: Path | None, *, follow: bool) -> None:
    """Print a line whenever it is due, until nobody reads it any more."""
    found = RunList(scratch, named)
    while True:
        began = time.thread_time()
        print(json.dumps(found.read_news()), flush=True)
        if not follow:
            return
        time.sleep(max(INTERVAL, IDLE_SHARE * (time.thread_time() - began)))
