"""Read the trials of a sweep from its folder and, for those under way, from the scheduler.

A sweep may have ten thousand trials: reading takes one listing, one small file for each trial that
has ended, and more (with one query to the scheduler for all) only for those that have started and
not ended.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import NUMBER, Fields, keep_valid, read_fields, read_text
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
from paceline.launch.run_folder import require_not_fetched
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import ENDED, LIVE, WAITING, JobState
from paceline.spec.run_path import STORE
from paceline.spec.user_files import is_own_folder, require_own_folder
from paceline.sweep.folder import is_starting
from paceline.watch.events import read_events
from paceline.watch.failure import failure_text, read_failure
from paceline.watch.metrics import as_number, read_end
from paceline.watch.records import QueryStates, read_records
from paceline.watch.scheduler import query_states

RUNNING, PENDING = "running", "pending"
MISSING = "missing"  # it has no result and no job: stopped, cancelled or lost
STATES = (DONE, PRUNED, FAILED, MISSING, RUNNING, PENDING)  # in the order of the progress bar
SPEC_FIELDS: Fields = {"metric": str, "direction": str, "space": dict, "created": NUMBER}
TRIAL_FIELDS: Fields = {
    "number": int,
    "group": int,
    "point": dict,
    "seed": int,
    "state": str,
    "seconds": NUMBER,
    "started": NUMBER,
    "ended": NUMBER,
    "error": str,
    "step": int,
}
_PRECEDENCE = (RUNNING, PENDING, MISSING, FAILED, PRUNED, DONE)
TAIL = 16384  # bytes at the end of a file to search for what is newest


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, started or not."""

    number: int
    point: dict[str, Any]
    state: str
    folder: TrialFolder
    group: int = 0  # the same for equal points with different seeds
    seed: int | None = None
    value: float | None = None  # of the sweep's metric: final, or the newest of a running trial
    seconds: float | None = None
    step: int | None = None  # of its value, once it has ended
    error: str = ""  # its first line
    job: str | None = None  # its newest array task

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder.path)}


@dataclass(frozen=True)
class Sweep:
    """A sweep as read from its folder."""

    folder: SweepFolder
    spec: dict[str, Any]  # sweep.json
    trials: list[Trial] = field(default_factory=list)  # by number

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def metric(self) -> str:
        return str(self.spec.get("metric") or "value")

    @property
    def maximizes(self) -> bool:
        return self.spec.get("direction") == "maximize"

    @cached_property
    def keys(self) -> list[str]:
        """The parameters, in the order of the sweep's file, then those that only trials have."""
        listed = dict.fromkeys(str(key) for key in self.spec.get("space") or {})
        for trial in self.trials:
            listed.update(dict.fromkeys(trial.point))
        known = {key for trial in self.trials for key in trial.point}
        return [key for key in listed if key in known]

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of trials in each state, without empty states, in the order of the progress
        bar.
        """
        counted = Counter(trial.state for trial in self.trials)
        return {state: counted[state] for state in STATES if counted[state]}


def find_sweep(name: str, scratch: Path) -> SweepFolder:
    """Find a sweep by its folder, its name or a prefix; `last` is the newest. Only its folder
    finds another user's.
    """
    if SweepFolder(Path(name)).spec.is_file():
        return SweepFolder(Path(name).resolve())
    found = (path.parent for path in scratch.glob("*/*/*/sweep.json"))
    known = sorted(path for path in found if path.parent.name != STORE and is_own_folder(path))
    if name == "last":
        meant = sorted(known, key=lambda path: (path / "sweep.json").stat().st_mtime)[-1:]
    else:
        meant = [path for path in known if path.name == name]
        meant = meant or [path for path in known if path.name.startswith(name)]
    if len(meant) == 1:
        return SweepFolder(meant[0])
    if meant:
        raise UsageError(
            f"{name!r} matches {len(meant)} sweeps: {', '.join(str(path) for path in meant[:5])}",
            hint="Write more of the name, or give the sweep's folder.",
        )
    names = ", ".join(path.name for path in known[:8])
    hint = f"The sweeps are: {names}." if names else "Start one with `paceline sweep sweep.toml`."
    what = f"sweep {name!r}" if known else "sweeps"
    raise UsageError(f"You have no {what} in {scratch}.", hint=hint)


def find_own_sweep(name: str, scratch: Path) -> SweepFolder:
    """Find a sweep as `find_sweep` does, to change it. Raises UsageError if it is another
    user's.
    """
    sweep = find_sweep(name, scratch)
    require_own_folder(sweep.path, "Sweep")
    require_not_fetched(RunFolder(sweep.path))
    return sweep


def read_sweep(folder: SweepFolder, query: QueryStates = query_states) -> Sweep:
    """Read all trials of a sweep: those that have ended, those under way, and those not started."""
    spec = read_fields(folder.spec, SPEC_FIELDS)
    lines = (keep_valid(line, TRIAL_FIELDS) for line in read_lines(folder.points))
    planned = {line["number"]: line for line in lines if "number" in line}
    jobs = _jobs(folder)
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
    to_come = planned.keys() - found.keys() - {trial.number for trial in under_way}
    # A trial that was submitted again has its earlier folder until it starts.
    unfinished = to_come | {trial.number for trial in under_way}
    relevant = [jobs[number] for number in unfinished if number in jobs]
    known = _query(
        [*relevant, *(job for trial in under_way if (job := slurm.read_job_id(trial)) is not None)],
        query,
    )
    for each in _read_started(under_way, planned, str(spec.get("metric") or ""), known):
        found[each.number] = each
    for number in to_come:
        found[number] = _not_started(folder.trial(number), planned[number], jobs.get(number), known)
    for number in unfinished & found.keys() & jobs.keys():
        newest = (known or {}).get(jobs[number])
        is_lost = found[number].state == MISSING
        if newest is not None and (newest.phase == WAITING or (is_lost and newest.phase == LIVE)):
            found[number] = replace(found[number], state=PENDING, value=None, error="")
    jobless = [
        number for number, each in found.items() if each.state == MISSING and number not in jobs
    ]
    for number in jobless if jobless and is_starting(folder) else ():
        found[number] = replace(found[number], state=PENDING, error="")
    return Sweep(
        folder, spec, [replace(found[number], job=jobs.get(number)) for number in sorted(found)]
    )


def _jobs(folder: SweepFolder) -> dict[int, str]:
    """Return each trial's newest task."""
    return {
        number: f"{line.get('job')}_{index}"
        for line in folder.read_jobs()
        for index, numbers in line["tasks"].items()
        for number in numbers
    }


def _query(jobs: list[str], query: QueryStates) -> Mapping[str, JobState] | None:
    """Return the states of jobs with one query; None if no scheduler answers."""
    try:
        return query(jobs) if jobs else {}
    except ClusterError:
        return None


def _numbers(trials: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(trials) if name.isdigit())
    except OSError:
        return []


def _ended(folder: TrialFolder, planned: dict[str, Any]) -> Trial | None:
    """Return a trial that has a result; None if it has none."""
    result = read_fields(folder.result, TRIAL_FIELDS)
    state = result.get("state")
    if state not in (DONE, FAILED, PRUNED, NO_POINT):
        return None
    record = result if result.get("point") is not None else planned
    if record.get("point") is None:
        record = read_fields(folder.trial, TRIAL_FIELDS)
    seconds, began, ended = result.get("seconds"), result.get("started"), result.get("ended")
    if seconds is None and began is not None and ended is not None:
        seconds = ended - began
    error = first_line(str(result.get("error") or ""))
    return _trial(
        folder,
        {**planned, "point": record.get("point"), "seed": record.get("seed")},
        state=state,
        value=as_number(result.get("value")),
        seconds=as_number(seconds),
        step=result.get("step"),
        error=error or (find_error(folder) if state == FAILED else ""),
    )


def _read_started(
    folders: list[TrialFolder],
    planned: Mapping[int, dict[str, Any]],
    metric: str,
    known: Mapping[str, JobState] | None,
) -> Iterator[Trial]:
    """Yield trials with a folder and no result, running or not: a job that was killed leaves no
    result.
    """

    def answer(_: Iterable[str]) -> Mapping[str, JobState]:
        if known is None:
            raise ClusterError(
                "The scheduler is not responding.",
                hint="Check the controller with `scontrol ping`.",
            )
        return known

    for folder, record in zip(folders, read_records(folders, answer), strict=True):
        state, error = RUNNING, ""
        if record.is_over:
            # one that failed for good has a result
            state = DONE if record.status == DONE else MISSING
            error = "" if state == DONE else find_error(folder) or f"it is {record.status}"
        value = newest_value(folder.reports, "value")
        own = read_fields(folder.trial, TRIAL_FIELDS)
        yield _trial(
            folder,
            {**planned.get(folder.number, {}), **own},
            state=state,
            value=newest_value(folder.metrics, metric) if value is None else value,
            error=error,
        )


def _not_started(
    folder: TrialFolder,
    planned: dict[str, Any],
    job: str | None,
    known: Mapping[str, JobState] | None,
) -> Trial:
    """Return a trial without a folder: pending, or missing if its job is gone."""
    if job is None:
        return _trial(folder, planned, state=MISSING, error="not started, and without a job")
    if known is None:
        return _trial(folder, planned, state=PENDING)
    state = known.get(job)
    if state is not None and state.phase != ENDED:
        return _trial(folder, planned, state=PENDING)
    gone = f"its job {job} is {state.label}" if state else f"its job {job} is gone"
    return _trial(folder, planned, state=MISSING, error=gone)


def _trial(folder: TrialFolder, record: Mapping[str, Any], *, state: str, **known: Any) -> Trial:
    number = folder.number
    return Trial(
        number,
        point=dict(record.get("point") or {}),
        state=state,
        folder=folder,
        seed=record.get("seed"),
        group=record.get("group", number),
        **known,
    )


def find_error(folder: RunFolder) -> str:
    """Return the first error line of the newest attempt that failed; without one, why the agents
    failed, or the last message of the batch script.
    """
    for attempt in reversed(folder.attempts()):
        if failure := read_failure(attempt):
            return first_line(failure_text(failure))
    reasons = [event["reason"] for event in read_events(folder.events) if event.get("reason")]
    if reasons:
        return first_line(str(reasons[-1]))
    # Indented lines are hints.
    lines = [
        line.removeprefix("paceline: ").removeprefix("error: ")
        for line in read_text(folder.slurm_log, TAIL).splitlines()
        if line.strip() and not line.startswith(("paceline: job ", "  "))
    ]
    return lines[-1] if lines else ""


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def newest_value(metrics: Path, name: str) -> float | None:
    """Return the last value of a metric, reading only the end of the file."""
    values = (as_number(record.get(name)) for record in reversed(read_end(metrics, TAIL)))
    return next((value for value in values if value is not None), None)


def finished(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that ended with a value."""
    return [trial for trial in trials if trial.state == DONE and trial.value is not None]


# -- rows: trials in order; those of one point with different seeds share a row


@dataclass(frozen=True)
class Row:
    """One point: a trial, or its trials with several seeds."""

    trials: tuple[Trial, ...]
    # for repeats, the mean over those that are done; of a pruned point over all
    value: float | None
    deviation: float | None  # sample standard deviation; None for fewer than two
    count: int  # values in the mean

    @property
    def number(self) -> int:
        return self.trials[0].number

    @property
    def point(self) -> dict[str, Any]:
        return self.trials[0].point

    @property
    def state(self) -> str:
        return next(
            state for state in _PRECEDENCE if any(trial.state == state for trial in self.trials)
        )

    @property
    def counts(self) -> bool:
        """Whether its value ranks it: a single trial's once it is done, a mean from the first
        repeat on.
        """
        return (
            self.value is not None
            and not self.is_pruned
            and (self.state == DONE or len(self.trials) > 1)
        )

    @property
    def is_pruned(self) -> bool:
        return any(trial.state == PRUNED for trial in self.trials)

    @property
    def status(self) -> str:
        """The state; if repeats differ, how many are in each."""
        counted = Counter(trial.state for trial in self.trials)
        return (
            self.state
            if len(counted) == 1
            else ", ".join(f"{n} {state}" for state, n in counted.most_common())
        )

    @property
    def seconds(self) -> float | None:
        known = [trial.seconds for trial in self.trials if trial.seconds is not None]
        return statistics.fmean(known) if known else None


def has_repeats(sweep: Sweep) -> bool:
    return len({trial.group for trial in sweep.trials}) < len(sweep.trials)


def rows(sweep: Sweep) -> list[Row]:
    """Return a row for each point, by number."""
    if not has_repeats(sweep):
        return [
            Row((trial,), trial.value, None, int(trial.value is not None)) for trial in sweep.trials
        ]
    together: dict[int, list[Trial]] = {}
    for trial in sweep.trials:
        together.setdefault(trial.group, []).append(trial)
    return [_repeats(trials) for trials in together.values()]


def _repeats(trials: list[Trial]) -> Row:
    pruned = any(trial.state == PRUNED for trial in trials)  # by the mean of all: show that
    values = [
        trial.value
        for trial in trials
        if (pruned or trial.state == DONE) and trial.value is not None
    ]
    return Row(
        tuple(trials),
        value=statistics.fmean(values) if values else None,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        count=len(values),
    )


def value_text(row: Row) -> str:
    """Return a row's value; for repeats, the mean, the deviation and their number."""
    if row.value is None:
        return ""
    if len(row.trials) == 1:
        return f"{row.value:.5g}"
    spread = f" ± {row.deviation:.2g}" if row.deviation is not None else ""
    return f"{row.value:.5g}{spread} (n={row.count})"


def best_first(sweep: Sweep, listed: Iterable[Row]) -> list[Row]:
    """Sort rows: done by value, then running, pruned, failed, missing and pending."""
    order = {DONE: 0, RUNNING: 1, PRUNED: 2, FAILED: 3, MISSING: 4, PENDING: 5}
    sign = -1.0 if sweep.maximizes else 1.0

    def position(row: Row) -> tuple[int, float, int]:
        first = order[DONE] if row.counts else order[PRUNED if row.is_pruned else row.state]
        return first, float("inf") if row.value is None else sign * row.value, row.number

    return sorted(listed, key=position)


def comparable(value: object) -> tuple[int, float, str]:
    """Sort key: numbers by size, then the rest as text."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def to_label(value: object) -> str:
    """Return a value as a short label, the same for equal numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
