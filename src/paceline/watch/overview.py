"""One row per run: what `paceline ps`, `paceline top` and the list of runs in the browser show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.spec.quantities import show_seconds
from paceline.watch import origin
from paceline.watch.goodput import last_output, read_goodput
from paceline.watch.metrics.latest import as_number
from paceline.watch.metrics.progress import STALLED, Progress, find_attempt, read_total_steps
from paceline.watch.rank_samples import read_first_rank
from paceline.watch.records import Record


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
    # Its files tell how far it is, also while Slurm does not answer.
    may_run = is_running or (record.status == "unknown" and not record.is_over)
    now = origin.now()
    progress = (
        Progress(latest, find_attempt(events), read_first_rank(folder), now) if may_run else None
    )
    pause = progress.pause if progress and is_running else 0.0
    step = progress.step if progress else latest.step
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
        step=record.step if step is None else step,
        total_steps=total,
        seconds_left=progress.seconds_left(total) if progress else None,
        loss=latest.loss,
        loss_name=latest.loss_name,
        rate=None if record.is_waiting else latest.rate,
        rate_unit="" if record.is_waiting else latest.rate_unit,
        goodput=_goodput(record, events),
        starts=_starts(record),
        detail="; ".join(filter(None, (record.detail, _describe_pause(folder, pause)))),
        hint=record.hint,
    )


def _describe_pause(folder: RunFolder, pause: float) -> str:
    """Say for how long a run has made no step, unless it prints meanwhile, such as in an
    evaluation.
    """
    if not pause or origin.now() - last_output(folder) < STALLED:
        return ""
    return f"no step for {show_seconds(round(pause))}"


def _goodput(record: Record, events: Sequence[dict[str, Any]]) -> float | None:
    shares = read_goodput(
        record.folder, events, is_over=record.is_over, is_waiting=record.is_waiting
    )
    if shares.total <= shares.seconds["queued"]:
        return None  # it has never started
    if shares.seconds["running"] and not shares.seconds["training"]:
        return None  # a script without the runtime has no steps that anybody could count
    return shares.share("training")


def _starts(record: Record) -> float | None:
    if record.state is None or not record.is_waiting:
        return None
    with suppress(ValueError):
        return time.mktime(time.strptime(record.state.start, "%Y-%m-%dT%H:%M:%S"))
    return None
