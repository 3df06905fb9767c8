"""What became of a sweep: its trials, from the files of its folder and, for those under way, from the scheduler.

A sweep may have ten thousand trials: one listing, one small file for each that has ended, and a closer look
(one question to the scheduler for all) at those only that have begun and not ended.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import ENDED, WAITING, JobState
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import (
    DONE,
    FAILED,
    NO_POINT,
    PRUNED,
    SweepFolder,
    TrialFolder,
    read_lines,
)
from paceline.errors import ClusterError, UsageError
from paceline.plan.run_path import STORE
from paceline.sweep.folder import is_starting
from paceline.watch.records import QueryStates, read_json, read_records

RUNNING, PENDING = "running", "pending"
MISSING = "missing"  # it has no result, and no job that would bring one: stopped, cancelled, lost
STATES = (DONE, PRUNED, FAILED, MISSING, RUNNING, PENDING)  # in the order in which a bar shows them
TAIL = 16384  # bytes of a metrics file that are looked at for its newest value


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, or one to come."""

    number: int
    point: dict[str, Any]
    state: str
    folder: TrialFolder
    group: int = 0  # the same for equal points with different seeds
    seed: int | None = None
    value: float | None = None  # of the sweep's metric: the final one, or the newest of a trial that runs
    seconds: float | None = None
    error: str = ""  # the first line of what went wrong
    job: str | None = None  # the newest task of an array that was to run it


@dataclass(frozen=True)
class Sweep:
    """A sweep as its folder tells it."""

    folder: SweepFolder
    told: dict[str, Any]  # sweep.json
    trials: list[Trial] = field(default_factory=list)  # in the order of their numbers

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def metric(self) -> str:
        return str(self.told.get("metric") or "value")

    @property
    def maximizes(self) -> bool:
        return self.told.get("direction") == "maximize"

    @cached_property
    def keys(self) -> list[str]:
        """The parameters, in the order of the sweep's file; then those that only trials know."""
        listed = dict.fromkeys(str(key) for key in self.told.get("space") or {})
        for trial in self.trials:
            listed.update(dict.fromkeys(trial.point))
        known = {key for trial in self.trials for key in trial.point}
        return [key for key in listed if key in known]

    def is_log(self, key: str) -> bool | None:
        """Whether a parameter was searched by its order of magnitude; None where the sweep's file does not say."""
        way = (self.told.get("space") or {}).get(key)
        if not isinstance(way, dict) or not {"uniform", "log_uniform", "integer"} & way.keys():
            return None
        return "log_uniform" in way or bool(way.get("log"))

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many trials are in each state, in the order in which a bar shows them; those of none are left out."""
        counted = Counter(trial.state for trial in self.trials)
        return {state: counted[state] for state in STATES if counted[state]}


def find_sweep(name: str, scratch: Path) -> SweepFolder:
    """A sweep by its folder, its name, or the beginning of it; `last` is the newest."""
    if SweepFolder(Path(name)).spec.is_file():
        return SweepFolder(Path(name).resolve())
    found = (path.parent for path in scratch.glob("*/*/*/sweep.json"))
    known = sorted(path for path in found if path.parent.name != STORE)
    if name == "last":
        meant = sorted(known, key=lambda path: (path / "sweep.json").stat().st_mtime)[-1:]
    else:
        meant = [path for path in known if path.name == name]
        meant = meant or [path for path in known if path.name.startswith(name)]
    if len(meant) == 1:
        return SweepFolder(meant[0])
    if meant:
        raise UsageError(
            f"{name!r} names {len(meant)} sweeps: {', '.join(str(path) for path in meant[:5])}",
            hint="write more of the name, or give the sweep's folder",
        )
    names = ", ".join(path.name for path in known[:8])
    raise UsageError(
        f"there is no sweep {name!r} in {scratch}",
        hint=f"the sweeps there: {names}" if names else "start one: paceline sweep sweep.toml",
    )


def read_sweep(folder: SweepFolder, ask: QueryStates = slurm.states) -> Sweep:
    """All trials of a sweep: those that have ended, those under way, and those still to come."""
    told = read_json(folder.spec)
    planned = {int(line["number"]): line for line in read_lines(folder.points) if "number" in line}
    jobs, again = _jobs(folder)
    found: dict[int, Trial] = {}
    under_way = []
    for number in _numbers(folder.trials):
        trial = folder.trial(number)
        ended = _ended(trial, planned.get(number, {}))
        if ended is not None and ended.state == NO_POINT:
            planned.pop(number, None)
        elif ended is not None:
            found[number] = ended
        else:
            under_way.append(trial)
    # Those that were submitted again have an old result until they begin.
    resubmitted = again & found.keys()
    to_come = planned.keys() - found.keys() - {trial.number for trial in under_way}
    mattering = [jobs[number] for number in (to_come | resubmitted) if number in jobs]
    known = _known(
        [*mattering, *(job for trial in under_way if (job := slurm.read_job_id(trial)) is not None)], ask
    )
    for each in _under_way(under_way, planned, str(told.get("metric") or ""), known):
        found[each.number] = each
    for number in to_come:
        found[number] = _to_come(folder.trial(number), planned[number], jobs.get(number), known)
    of_nobody = [number for number, each in found.items() if each.state == MISSING and number not in jobs]
    for number in of_nobody if of_nobody and is_starting(folder) else ():
        found[number] = replace(found[number], state=PENDING, error="")
    for number in resubmitted:
        state = (known or {}).get(jobs[number])
        if state is not None and state.phase == WAITING:
            found[number] = replace(found[number], state=PENDING, value=None, seconds=None, error="")
    return Sweep(folder, told, [replace(found[number], job=jobs.get(number)) for number in sorted(found)])


def _jobs(folder: SweepFolder) -> tuple[dict[int, str], set[int]]:
    """The newest task of each trial, and the trials that have had several."""
    jobs: dict[int, str] = {}
    again = set()
    for line in folder.read_jobs():
        for index, numbers in (line.get("tasks") or {}).items():
            for number in numbers:
                again |= {number} & jobs.keys()
                jobs[number] = f"{line.get('job')}_{index}"
    return jobs, again


def _known(jobs: list[str], ask: QueryStates) -> Mapping[str, JobState] | None:
    """The states of all jobs that matter, by one question; None where no scheduler answers."""
    try:
        return ask(jobs) if jobs else {}
    except ClusterError:
        return None


def _numbers(trials: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(trials) if name.isdigit())
    except OSError:
        return []


def _ended(folder: TrialFolder, planned: dict[str, Any]) -> Trial | None:
    """A trial that has left its result."""
    result = read_json(folder.result)
    state = result.get("state")
    if state not in (DONE, FAILED, PRUNED, NO_POINT):
        return None
    told = result if result.get("point") is not None else planned
    if told.get("point") is None:
        told = read_json(folder.trial)
    seconds, began, ended = result.get("seconds"), result.get("started"), result.get("ended")
    if seconds is None and began is not None and ended is not None:
        seconds = ended - began
    error = first_line(str(result.get("error") or ""))
    return _trial(
        folder, {**planned, "point": told.get("point"), "seed": told.get("seed")}, state=state,
        value=as_number(result.get("value")), seconds=as_number(seconds),
        error=error or (_why(folder) if state == FAILED else ""),
    )  # fmt: skip


def _under_way(
    folders: list[TrialFolder],
    planned: Mapping[int, dict[str, Any]],
    metric: str,
    known: Mapping[str, JobState] | None,
) -> Iterator[Trial]:
    """Trials with a folder and no result: whether they still run. A job that was killed leaves no result."""

    def answer(_: Iterable[str]) -> Mapping[str, JobState]:
        if known is None:
            raise ClusterError("no scheduler answers")
        return known

    for folder, record in zip(folders, read_records(folders, answer), strict=True):
        state, error = RUNNING, ""
        if record.is_over:
            state = DONE if record.status == DONE else MISSING  # one that has failed for good has a result
            error = "" if state == DONE else _why(folder) or f"it is {record.status}"
        value = newest_value(folder.reports, "value")
        yield _trial(
            folder, {**planned.get(folder.number, {}), **read_json(folder.trial)}, state=state,
            value=newest_value(folder.metrics, metric) if value is None else value, error=error,
        )  # fmt: skip


def _to_come(
    folder: TrialFolder, planned: dict[str, Any], job: str | None, known: Mapping[str, JobState] | None
) -> Trial:
    """A trial with no folder yet. One whose job is gone will never have one."""
    if job is None:
        return _trial(folder, planned, state=MISSING, error="it has not begun, and has no job")
    if known is None:
        return _trial(folder, planned, state=PENDING)
    state = known.get(job)
    if state is not None and state.phase != ENDED:
        return _trial(folder, planned, state=PENDING)
    gone = f"its job {job} is {state.label}" if state else f"its job {job} is gone"
    return _trial(folder, planned, state=MISSING, error=gone)


def _trial(folder: TrialFolder, told: Mapping[str, Any], *, state: str, **known: Any) -> Trial:
    number = folder.number
    return Trial(
        number, point=dict(told.get("point") or {}), state=state, folder=folder, seed=told.get("seed"),
        group=told.get("group", number), **known,
    )  # fmt: skip


def _why(folder: RunFolder) -> str:
    """The first error line of the newest attempt that failed."""
    for attempt in reversed(folder.attempts()):
        failure = read_json(attempt.failure)
        if failure:
            words = [str(failure[key]) for key in ("type", "message") if failure.get(key)]
            return first_line(": ".join(words) or str(failure.get("cause", "")))
    return ""


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def newest_value(metrics: Path, name: str) -> float | None:
    """The last value of a metric; only the file's end is read."""
    try:
        with open(metrics, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            value = json.loads(line).get(name)
        except (ValueError, AttributeError):
            continue
        if (number := as_number(value)) is not None:
            return number
    return None


def as_number(value: object) -> float | None:
    """A number that can be compared with others; None for what is none, and for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def finished(trials: Iterable[Trial]) -> list[Trial]:
    """Those that were run to their end and have a value."""
    return [trial for trial in trials if trial.state == DONE and trial.value is not None]
