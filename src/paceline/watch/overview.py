"""How far a running run is, and when it will be done: from what it logged, its events, and what
its agent saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.spec.quantities import show_seconds
from paceline.watch import origin
from paceline.watch.events import ENDS
from paceline.watch.goodput import last_output
from paceline.watch.metrics import as_number
from paceline.watch.node_usage import read_first_rank
from paceline.watch.records import QueryStates, Record, read_records
from paceline.watch.run_status import expected_start
from paceline.watch.scheduler import query_states

STALLED = 60.0  # seconds without a step after which the row says so
SILENT = 300.0  # the same where only logged numbers tell, which may be of one step in a hundred
STALLED_STEPS = 20  # and as many steps as would have fit in
FRESH = 120.0  # seconds; older samples of a node say nothing about now
# seconds and steps without a heartbeat: it evaluates, nobody knows for how long
PAUSED, PAUSED_STEPS = 5.0, 10
UNSEEN, UNSEEN_LINES = 30.0, 3  # the same for lines, which a file server may show late
LONGEST = 1e9  # seconds; nobody waits for longer


@dataclass(frozen=True)
class Attempt:
    """The newest attempt of a run: from when on it trains, and from which step."""

    began: float = 0.0
    step: int | None = None
    is_training: bool = True  # as far as anybody knows; or else it starts, or has ended
    total_steps: int | None = None  # of the whole run, as far as its loops tell


def find_attempt(events: Iterable[dict[str, Any]]) -> Attempt:
    """Return the newest attempt that has trained, and whether it still does."""
    found = Attempt()
    for event in events:
        name, is_first = event["event"], event.get("index", 0) == 0 and 0 in event.get("ranks", [0])
        if name == "training":  # it may not know how many steps the last one knew
            found = Attempt(float(event["time"]), event.get("step"), total_steps=event.get("steps"))
        elif name == "total_steps":
            found = replace(found, total_steps=event.get("steps"))
        elif name in ENDS or name == "session_end" or (name in ("node", "launch") and is_first):
            found = replace(found, is_training=False)
    return found


@dataclass(frozen=True)
class Progress:
    """How far a running run is."""

    step: int | None
    pause: float = 0.0  # for how long it has made no step, if that is unusually long
    seconds_left: float | None = None  # None if nobody knows: it starts, evaluates or hangs


def read_progress(record: Record, attempt: Attempt) -> Progress:
    """Return how far a run is: by what it logged, its events, and what its agent saw of rank 0."""
    now, latest, total = origin.now(), record.latest, attempt.total_steps
    logged = latest.since(attempt.began)
    seen = read_first_rank(record.folder)
    if seen is not None and (seen.step <= 0 or seen.time < attempt.began):
        seen = None
    # the last one may have got further
    last = int(logged.points[-1][1]) if logged.points else None
    known = [attempt.step, last, seen.step if seen else None]
    step = max((each for each in known if each is not None), default=latest.step)
    if not attempt.is_training:
        return Progress(step)
    age = seen.age if seen is not None and now - seen.time < FRESH else None  # of its heartbeat
    moments = [latest.time or 0.0, attempt.began]
    if seen is not None and age is not None:
        moments.append(seen.time - age)
    quiet = max(0.0, now - max(moments)) if any(moments) else 0.0
    pace = logged.pace or (seen.seconds_per_step if seen is not None else 0.0)
    limit = SILENT if age is None else STALLED
    pause = quiet if quiet > max(limit, STALLED_STEPS * pace) else 0.0
    is_first_step = (last or 0) <= (attempt.step or 0) + 1 and len(logged.points) < 2
    if total is None or step is None or logged.pace is None or is_first_step:  # it takes longer
        return Progress(step, pause)
    interval = max(pace, logged.interval)
    evaluates = age is not None and age > max(PAUSED, PAUSED_STEPS * pace)
    if evaluates or quiet > max(UNSEEN, PAUSED_STEPS * pace, UNSEEN_LINES * interval):
        return Progress(step, pause)
    left = max(0.0, (total - step) * pace - min(quiet, interval))
    return Progress(step, pause, left if left < LONGEST else None)


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
    details, folder, latest = record.details, record.folder, record.latest
    attempt, now = find_attempt(record.events), origin.now()
    # Its files tell how far it is, also while Slurm does not answer.
    may_run = record.status in ("running", "unknown") and not record.is_over
    progress = read_progress(record, attempt) if may_run else Progress(latest.step)
    step, saved = progress.step, find_checkpoints(folder.path) if latest.step is None else []
    if step is None and saved:
        step = checkpoint_step(saved[0].name)
    pause = ""
    # it may print meanwhile, such as in an evaluation
    if record.status == "running" and progress.pause and now - last_output(folder) >= STALLED:
        pause = f"no step for {show_seconds(round(progress.pause))}"
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
        step=step,
        total_steps=attempt.total_steps,
        seconds_left=progress.seconds_left,
        loss=latest.loss,
        loss_name=latest.loss_name,
        rate=None if record.is_waiting else latest.rate,
        rate_unit="" if record.is_waiting else latest.rate_unit,
        goodput=_goodput(record),
        starts=expected_start(record.state, now) if record.state and record.is_waiting else None,
        detail="; ".join(filter(None, (record.detail, pause))),
        hint=record.hint,
        request=str(details.get("request", "")),
    )


def _goodput(record: Record) -> float | None:
    shares = record.goodput
    if shares.total <= shares.seconds["queued"]:
        return None  # it has never started
    if shares.seconds["running"] and not shares.seconds["training"]:
        return None  # a script without the runtime has no steps that anybody could count
    return shares.share("training")


def read_rows(folders: Iterable[RunFolder], query: QueryStates = query_states) -> list[Overview]:
    """Return the rows of these runs, in their order."""
    return [make_overview(record) for record in read_records(folders, query)]
