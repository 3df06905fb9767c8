"""How far a running run is, and when it will be done: from what it logged, its events, and what
its agent saw.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.spec.quantities import show_seconds
from paceline.watch import origin
from paceline.watch.events import ENDS
from paceline.watch.goodput import last_output, read_goodput
from paceline.watch.latest import Latest, as_number
from paceline.watch.node_usage import RankSample, read_first_rank
from paceline.watch.reasons import expected_start
from paceline.watch.records import QueryStates, Record, read_records
from paceline.watch.scheduler import query_states

STALLED = 60.0  # seconds without a step after which the row says so
SILENT = 300.0  # the same where only logged numbers tell, which may be of one step in a hundred
STALLED_STEPS = 20  # and as many steps as would have fit in
FRESH = 120.0  # seconds; older samples of a node say nothing about now
# seconds and steps without a heartbeat: it evaluates, nobody knows for how long
PAUSED, PAUSED_STEPS = 5.0, 10
LONGEST = 1e9  # seconds; nobody waits for longer
UNSEEN, UNSEEN_LINES = 30.0, 3  # the same for lines, which a file server may show late


@dataclass(frozen=True)
class Attempt:
    """The newest attempt of a run: from when on it trains, and from which step."""

    began: float = 0.0
    step: int | None = None
    is_training: bool = True  # as far as anybody knows; or else it starts, or has ended


def find_attempt(events: Iterable[dict[str, Any]]) -> Attempt:
    """Return the newest attempt that has trained, and whether it still does."""
    found = Attempt()
    for event in events:
        name = event["event"]
        if name == "training":
            found = Attempt(float(event["time"]), event.get("step"))
        elif (
            name in ENDS
            or name == "session_end"
            or (name in ("node", "launch") and _is_of_rank_0(event))
        ):
            found = Attempt(found.began, found.step, is_training=False)
    return found


def _is_of_rank_0(event: dict[str, Any]) -> bool:
    return event.get("index", 0) == 0 and 0 in event.get("ranks", [0])


def read_total_steps(events: Iterable[dict[str, Any]]) -> int | None:
    """Return how many steps the newest attempt will have in all, as far as its loops tell."""
    total = None
    for event in events:
        if event["event"] in ("training", "total_steps"):
            total = event.get("steps")  # a new attempt may not know what the last one knew
    return total if isinstance(total, int) else None


class Progress:
    """How far a running run is. `seen` is rank 0, as its agent saw it last; `now` is the time
    there.
    """

    def __init__(
        self, latest: Latest, attempt: Attempt, seen: RankSample | None, now: float
    ) -> None:
        is_current = seen is not None and seen.step > 0 and seen.time >= attempt.began
        self._attempt, self._latest = attempt, latest
        self._seen = seen if is_current else None
        self._logged = latest.since(attempt.began)
        self._now = now

    @property
    def step(self) -> int | None:
        """The newest step of this attempt that anybody knows of: the last one may have got
        further.
        """
        known = [self._attempt.step, self._logged.step, self._seen.step if self._seen else None]
        steps = [step for step in known if step is not None]
        return max(steps) if steps else self._latest.step

    @property
    def pause(self) -> float:
        """For how long it has made no step, if that is unusually long; else 0, and while it
        starts.
        """
        if not self._attempt.is_training:
            return 0.0
        limit = SILENT if self._fresh is None else STALLED
        pause = self._quiet()
        return pause if pause > max(limit, STALLED_STEPS * self._pace) else 0.0

    def seconds_left(self, total: int | None) -> float | None:
        """Return how long it will still train, at the pace of this attempt.

        None if nobody knows: while it starts, evaluates or hangs, or if its numbers make no sense.
        """
        step, pace = self.step, self._logged.pace
        if total is None or step is None or pace is None or not self._attempt.is_training:
            return None
        if (self._logged.step or 0) <= (self._attempt.step or 0) + 1 and len(
            self._logged.points
        ) < 2:
            return None  # the first step takes longer than others
        if self._fresh is not None and (self._fresh.age or 0.0) > max(PAUSED, PAUSED_STEPS * pace):
            return None
        quiet, interval = self._quiet(), max(pace, self._logged.interval)
        if quiet > max(UNSEEN, PAUSED_STEPS * pace, UNSEEN_LINES * interval):
            return None
        left = max(0.0, (total - step) * pace - min(quiet, interval))
        return left if left < LONGEST else None

    @property
    def _pace(self) -> float:
        return self._logged.pace or (self._seen.seconds_per_step if self._seen is not None else 0.0)

    @property
    def _fresh(self) -> RankSample | None:
        """What its agent saw a moment ago."""
        seen = self._seen
        return (
            seen
            if seen is not None and seen.age is not None and self._now - seen.time < FRESH
            else None
        )

    def _quiet(self) -> float:
        """Return the seconds since its last step that anybody knows of; 0 without any."""
        known = [each for each in (self._latest.time, self._attempt.began) if each]
        if self._fresh is not None:
            known.append(self._fresh.time - (self._fresh.age or 0.0))
        return max(0.0, self._now - max(known)) if known else 0.0


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
    request: str = ""  # the submission from another machine; jobs of one race have the same

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
        starts=expected_start(record.state, now) if record.state and record.is_waiting else None,
        detail="; ".join(filter(None, (record.detail, _describe_pause(folder, pause)))),
        hint=record.hint,
        request=str(details.get("request", "")),
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


def read_rows(folders: Iterable[RunFolder], query: QueryStates = query_states) -> list[Overview]:
    """Return the rows of these runs, in their order."""
    return [make_overview(record) for record in read_records(folders, query)]


def changed(path: Path | str) -> int:
    """Return when a file or folder last changed, in nanoseconds since 1970; 0 if it is missing."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
