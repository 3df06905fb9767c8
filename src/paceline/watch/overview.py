"""One row per run: what `paceline ps`, `paceline top` and the list of runs in the browser show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.contract.run_folder import TRIALS
from paceline.watch.goodput import read_goodput
from paceline.watch.metrics.latest import Latest, as_number
from paceline.watch.records import Record

STALLED = 300.0  # seconds without a step after which the time left is unknown
STALLED_STEPS = 20  # and as many steps as would have fit in


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
        step=latest.step if record.step is None else record.step,
        total_steps=total,
        seconds_left=_seconds_left(record, latest, total),
        loss=latest.loss,
        loss_name=latest.loss_name,
        rate=latest.rate,
        rate_unit=latest.rate_unit,
        goodput=_goodput(record, events),
        starts=_starts(record),
        detail=record.detail,
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


def _seconds_left(record: Record, latest: Latest, total: int | None) -> float | None:
    """Return when a run that trains will be done, at its recent pace."""
    pace, step = latest.seconds_per_step, latest.step
    if record.is_over or record.status != "running" or total is None or step is None or pace is None:
        return None
    since = 0.0 if latest.time is None else time.time() - latest.time
    if since > max(STALLED, STALLED_STEPS * pace):
        return None  # it hangs, or evaluates: nobody knows when it goes on
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
