"""One row per run: what `paceline ps`, `paceline top` and the list of runs in the browser show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.contract.run_folder import TRIALS
from paceline.spec.quantities import show_seconds
from paceline.watch.goodput import read_goodput
from paceline.watch.metrics.latest import Latest, as_number
from paceline.watch.rank_samples import RankSample, read_first_rank
from paceline.watch.records import Record

STALLED = 60.0  # seconds without a step after which the row says so, and the time left is unknown
SILENT = 300.0  # the same where only logged numbers tell, which may be of one step in a hundred
STALLED_STEPS = 20  # and as many steps as would have fit in
FRESH = 120.0  # seconds; older samples of a node say nothing about now


@dataclass(frozen=True)
class Overview:
    """A run in one row. Times are in seconds since 1970; what is not known is None or empty."""

    run_id: str
    name: str
    project: str
    experiment: str
    sweep: str  # the sweep that it is a trial of
    trial: int | None
    program: str
    path: str
    status: str
    is_over: bool
    job: str
    nodes: int
    nproc: int
    attempts: int
    created: float | None
    updated: float | None  # when it last logged
    step: int | None
    total_steps: int | None  # of the whole run, if its loops know
    seconds_left: float | None  # at the recent pace, while it trains
    loss: float | None
    loss_name: str
    rate: float | None
    rate_unit: str  # samples/s, tokens/s or steps/s
    goodput: float | None  # the share of its time that went into steps that count
    starts: float | None  # when a job that waits is expected to start
    detail: str  # why it waits, where it runs or why it ended, in plain words
    hint: str

    @property
    def key(self) -> str:
        """What commands call the run: its id, or SWEEP-3 for a trial."""
        return self.run_id if self.trial is None else f"{self.sweep}-{self.trial}"

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def make_overview(record: Record) -> Overview:
    """Return the row of a run. Reads the end of its metrics, and its events."""
    details, folder = record.details, record.folder
    latest = record.latest
    events = record.events
    total = read_total_steps(events)
    is_running = record.status == "running" and not record.is_over
    seen = read_first_rank(folder) if is_running else None
    pause = _pause(latest, seen) if is_running else 0.0
    is_trial = folder.path.parent.name == TRIALS
    return Overview(
        run_id=record.run_id,
        name=str(details.get("name", "")),
        project=str(details.get("project", "")),
        experiment=str(details.get("experiment", "")),
        sweep=folder.path.parent.parent.name if is_trial else "",
        trial=int(folder.path.name) if is_trial and folder.path.name.isdigit() else None,
        program=str(details.get("program", "")),
        path=str(folder.path),
        status=record.status,
        is_over=record.is_over,
        job=record.job or "",
        nodes=int(details.get("nodes") or 1),
        nproc=int(details.get("nproc") or 1),
        attempts=record.attempts,
        created=as_number(details.get("created")),
        updated=latest.time,
        step=_step(record, latest, seen),
        total_steps=total,
        seconds_left=_seconds_left(latest, total, pause) if is_running else None,
        loss=latest.loss,
        loss_name=latest.loss_name,
        rate=None if record.is_waiting else latest.rate,
        rate_unit="" if record.is_waiting else latest.rate_unit,
        goodput=_goodput(record, events),
        starts=_starts(record),
        detail="; ".join(filter(None, (record.detail, f"no step for {show_seconds(round(pause))}" if pause else ""))),
        hint=record.hint,
    )


def make_overviews(records: Iterable[Record]) -> list[Overview]:
    return [make_overview(record) for record in records]


def read_total_steps(events: Iterable[dict[str, Any]]) -> int | None:
    """Return how many steps the newest attempt will have in all, as far as its loops tell."""
    total = None
    for event in events:
        if event["event"] in ("training", "total_steps"):
            total = event.get("steps")  # a new attempt may not know what the last one knew
    return total if isinstance(total, int) else None


def _step(record: Record, latest: Latest, seen: RankSample | None) -> int | None:
    """Return how far the run is: as it logged, or as its agent saw it since."""
    if record.step is not None:
        return record.step
    is_newer = seen is not None and seen.step > 0 and seen.time > (latest.time or 0.0)
    return seen.step if seen is not None and is_newer else latest.step


def _pause(latest: Latest, seen: RankSample | None) -> float:
    """Return for how long a running run has made no step, if that is unusually long; else 0."""
    now = time.time()
    since = [now - latest.time] if latest.time is not None else []
    limit = SILENT
    if seen is not None and seen.step > 0 and seen.age is not None and now - seen.time < FRESH:
        since.append(now - seen.time + seen.age)
        limit = STALLED
    pace = latest.seconds_per_step or (seen.seconds_per_step if seen is not None else 0.0)
    pause = min(since, default=0.0)
    return pause if pause > max(limit, STALLED_STEPS * pace) else 0.0


def _seconds_left(latest: Latest, total: int | None, pause: float) -> float | None:
    """Return when a run that trains will be done, at its recent pace."""
    pace, step = latest.seconds_per_step, latest.step
    if total is None or step is None or pace is None or pause:
        return None  # or it hangs, or evaluates: nobody knows when it goes on
    since = 0.0 if latest.time is None else time.time() - latest.time
    return max(0.0, (total - step) * pace - max(0.0, since))


def _goodput(record: Record, events: Sequence[dict[str, Any]]) -> float | None:
    shares = read_goodput(record.folder, events, is_over=record.is_over, is_waiting=record.is_waiting)
    return shares.share("training") if shares.total > 0 else None


def _starts(record: Record) -> float | None:
    if record.state is None or not record.is_waiting:
        return None
    with suppress(ValueError):
        return time.mktime(time.strptime(record.state.start, "%Y-%m-%dT%H:%M:%S"))
    return None
