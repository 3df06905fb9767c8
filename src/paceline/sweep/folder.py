"""A sweep's folder as whoever types `paceline sweep` writes it: what is searched for, the trials, the jobs."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import LIVE, WAITING
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import FAILED, Point, Search, SweepFolder
from paceline.errors import ClusterError, SpecError, UsageError
from paceline.plan.run_path import RunPath

STARTER = "starter"  # in a submission's folder: the pid and host of the command that brings its trials


class Ledger:
    """One sweep, new or known."""

    def __init__(self, run_path: RunPath) -> None:
        self.run_path = run_path  # the sweep's folder stands where a run's would
        self.folder = SweepFolder(run_path.folder.path)
        self.known: list[Point] = self.folder.read_points()

    @property
    def is_new(self) -> bool:
        return not self.folder.spec.is_file()

    def refuse_another(self, search: Search) -> None:
        """A sweep goes on only as the sweep that it is."""
        if self.is_new:
            if self.run_path.folder.run_json.is_file():
                raise UsageError(
                    f"{self.folder.path} is a run, not a sweep", hint="give the sweep another name: --name"
                )
            return
        old = self.folder.read_search()
        keys = ["metric", "direction", "sampler", *(["space"] if search.sampler in ("random", "tpe") else [])]
        keys += ["wandb_sweep"] if search.wandb_sweep else []
        for key in keys:
            if getattr(old, key) != getattr(search, key):
                raise SpecError(
                    f"the sweep {search.name!r} is there already, with another {key}: {getattr(old, key)!r}",
                    hint="give this one another name: --name, or name in [sweep]",
                )

    def kit_path(self) -> RunPath:
        """Where the next submission puts what it brings along."""
        taken = [int(path.name) for path in self.folder.path.glob("submissions/*") if path.name.isdigit()]
        number = max(taken, default=0) + 1
        return replace(
            self.run_path,
            experiment=f"{self.run_path.experiment}/{self.folder.name}/submissions",
            run_id=str(number),
        )

    def trial_path(self, number: int) -> RunPath:
        return replace(
            self.run_path,
            experiment=f"{self.run_path.experiment}/{self.folder.name}/trials",
            run_id=str(number),
        )

    @contextmanager
    def written(self, search: Search, new: Sequence[Point]) -> Iterator[None]:
        """Write the search and its new trials; take both back where the body fails before anything was submitted."""
        before = self.folder.spec.read_text(encoding="utf-8") if not self.is_new else None
        size = self.folder.points.stat().st_size if self.folder.points.exists() else None
        created = json.loads(before)["created"] if before else time.time()
        write_atomically(self.folder.spec, replace(search, created=created).to_json())
        with open(self.folder.points, "a", encoding="utf-8") as file:
            file.write("".join(point.to_line() for point in new))
        try:
            yield
        except BaseException:
            if size is None:
                self.folder.points.unlink()
            else:
                os.truncate(self.folder.points, size)
            if before is None:
                self.folder.spec.unlink()
            else:
                write_atomically(self.folder.spec, before)
            raise

    def note_job(self, job: str, *, submission: str, tasks: dict[int, list[int]]) -> None:
        line = {"time": time.time(), "job": job, "submission": submission, "tasks": tasks}
        with open(self.folder.jobs, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # -- trials that are there already -----------------------------------------------------------------

    def chosen(self, which: str) -> list[int]:
        """`failed`: ended in failure. `missing`: have no result, and no job that would bring one."""
        results = {point.number: _state(self.folder.trial(point.number).result) for point in self.known}
        if which == FAILED:
            return [number for number, state in results.items() if state == FAILED]
        without = [number for number, state in results.items() if state is None]
        alive = self.alive(without)
        return [number for number in without if number not in alive]

    def alive(self, numbers: Iterable[int]) -> set[int]:
        """Those that wait or run, here or as jobs."""
        wanted = set(numbers)
        newest: dict[int, str] = {}
        for line in self.folder.read_jobs():
            for index, listed in line["tasks"].items():
                newest |= {number: f"{line['job']}_{index}" for number in listed if number in wanted}
        jobs = {(number, job) for number, job in newest.items()}
        for number in wanted:  # a job that goes on in a new one has told its folder
            if job := slurm.read_job_id(self.folder.trial(number)):
                jobs.add((number, job))
        found = {number for number in wanted if pids_of(self.folder.trial(number).path)}
        if is_at_work(self.folder):  # what has no job yet, it brings
            found |= wanted - newest.keys()
        if not jobs:
            return found
        try:
            states = slurm.states(job for _, job in jobs)
        except ClusterError as problem:
            raise ClusterError(
                f"which trials are still queued is not known: {problem.message}", hint=problem.hint
            ) from None
        for number, job in jobs:
            if job in states and states[job].phase in (LIVE, WAITING):
                found.add(number)
        return found

    @contextmanager
    def reopened(self, numbers: Iterable[int]) -> Iterator[None]:
        """Trials that are to run again: what said that they were over goes away, unless the body fails."""
        marks = [self.folder.cancelled]
        for number in numbers:
            trial = self.folder.trial(number)
            marks += [trial.result, trial.cancelled]
        texts = {path: path.read_text(encoding="utf-8") for path in marks if path.exists()}
        for path in texts:
            path.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            for path, text in texts.items():
                write_atomically(path, text)
            raise


def _state(result: Path) -> str | None:
    try:
        told: Any = json.loads(result.read_text(encoding="utf-8"))
        return str(told["state"])
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def at_work(kit: Path) -> Iterator[None]:
    """While the body runs, others on this machine know that trials of this submission are still to come."""
    mark = kit / STARTER
    write_atomically(mark, f"{os.getpid()} {socket.gethostname()}\n")
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def is_at_work(sweep: SweepFolder) -> bool:
    """Whether a command on this machine, other than this one, still brings trials of a sweep."""
    for mark in sweep.path.glob(f"submissions/*/{STARTER}"):
        with suppress(OSError):
            pid, _, host = mark.read_text(encoding="utf-8").strip().partition(" ")
            if host == socket.gethostname() and int(pid) != os.getpid() and _is_paceline(int(pid)):
                return True
    return False


def _is_paceline(pid: int) -> bool:
    import psutil

    try:
        return any("paceline" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def pids_of(trial: Path) -> set[int]:
    """The commands on this machine, other than this one, that run a trial now."""
    found = set()
    for job_start in trial.glob("job-starts/pid-*"):
        pid = job_start.name.removeprefix("pid-")
        if (job_start / "verdict").exists() or not pid.isdigit() or int(pid) == os.getpid():
            continue
        if _is_paceline(int(pid)):
            found.add(int(pid))
    return found
