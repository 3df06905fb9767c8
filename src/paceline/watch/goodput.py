"""How a run spent its wall time, computed from its events.

    queued    submitted or requeued, but not yet started
    starting  an agent runs, but its ranks have not reached their first step
    running   ranks run, but their script has no step boundaries
    training  steps that did not have to be repeated
    saving    time for which saves blocked training
    lost      repeated steps, and the time until a failed or hung rank was noticed
    idle      the rest: waiting before a restart, shutting down

When a requeued job starts again, the time since the last event of the previous job start counts as queued.

The events used are `queued` (or `submitted`), `started`, `ranks` (with `uses_runtime`), `training` (the first step
boundary of an attempt, with its first step), `saving` (with `step` and `blocked` seconds), `failed`, `stopped` and
`done`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import NUMBER, Fields, keep_valid, read_objects
from paceline.contract.run_folder import RunFolder

SHARES = ("queued", "starting", "running", "training", "saving", "lost", "idle")
EVENT_FIELDS: Fields = {
    "time": NUMBER, "event": str, "step": int, "steps": int, "blocked": NUMBER, "job_start": str, "attempt": int,
    "processes": int, "names": list,
}  # fmt: skip
DESCRIPTIONS = frozenset({"node", "unreachable", "network", "lost"})  # of a node, not of what the run does
QUEUED = frozenset({"queued", "submitted"})
PHASES = QUEUED | {"started", "ranks", "training", "saving"}
ENDS = frozenset({"failed", "stopped", "done"})


@dataclass
class Goodput:
    """Seconds per category; `total` is the run's wall time so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    attempts: int = 0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0


@dataclass
class _TrainingSpan:
    """The training part of one attempt, from its first step boundary to its end."""

    began: float
    step: int
    ended: float = 0.0
    saves: list[tuple[float, int, float]] = field(default_factory=list)  # time, step, seconds blocked
    finished: bool = False  # ended by `done` or `stopped`, so nothing after the last save is lost


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all writers' events in order of time, skipping lines truncated by a crash."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in read_objects(file):
            event = keep_valid(line, EVENT_FIELDS)
            if "time" in event and "event" in event:
                found.append(event)
    return sorted(found, key=lambda event: event["time"])


def had_nothing_left(events: Iterable[dict[str, Any]]) -> bool:
    """Return whether the last start of a run found that all its steps were done already."""
    last = [event["event"] for event in events if event["event"] in ("started", "nothing_left")]
    return last[-1:] == ["nothing_left"]


def find_end(folder: RunFolder, events: Sequence[dict[str, Any]]) -> float | None:
    """Return when a run ended whose end nobody recorded, as far as its files tell: it was cancelled, killed or lost."""
    phases = [event for event in events if event["event"] in PHASES or event["event"] in ENDS]
    if not phases or phases[-1]["event"] in ENDS:
        return None
    last = float(phases[-1]["time"])
    if phases[-1]["event"] in QUEUED:
        return _latest([folder.cancelled], last)
    logs = [path for attempt in folder.attempts()[-1:] for path in attempt.path.glob("*.log")]
    return _latest([folder.metrics, folder.slurm_log, *logs], last)


def _latest(files: Iterable[Path], time: float) -> float:
    for path in files:
        with suppress(OSError):
            time = max(time, path.stat().st_mtime)
    return time


def compute_goodput(events: Iterable[dict[str, Any]], now: float | None = None) -> Goodput:
    """Divide a run's wall time into categories, until `now`, if its last event is not its end.

    For a run that is still active, that is the current time; for others, see `find_end`.
    """
    result = Goodput()
    spans: list[_TrainingSpan] = []
    phase, since = "", 0.0
    job_start, last = "", 0.0
    current: _TrainingSpan | None = None

    def close(until: float) -> None:
        if phase in ("queued", "starting", "running", "idle"):
            result.seconds[phase] += max(0.0, until - since)

    for event in events:
        if event["event"] in DESCRIPTIONS:
            continue
        kind, time = event["event"], float(event["time"])
        if kind == "started" and _requeued(job_start, str(event.get("job_start", ""))):
            if current is not None:
                current.ended, current = last, None
                phase, since = "queued", last
            elif phase in ("idle", "starting", "running"):
                close(last)
                phase, since = "queued", last
        previous = last
        job_start, last = str(event.get("job_start", job_start)), time
        if kind in ("queued", "submitted", "started", "ranks"):
            after = {"submitted": "queued", "queued": "queued"}.get(kind, "starting")
            if current is not None:  # an attempt without an event at its end
                current.ended = previous if after == "queued" else time  # a cancelled run may be resumed days later
                current = None
            close(time)
            if not event.get("uses_runtime", True):
                after = "running"
            phase, since = after, time
            result.attempts += kind == "ranks"
        elif kind == "training" and current is None:
            phase = "starting" if phase == "running" else phase  # it has step boundaries after all
            close(time)
            current = _TrainingSpan(began=time, step=int(event.get("step", 0)))
            spans.append(current)
            phase, since = "training", time
        elif kind == "saving" and current is not None:
            current.saves.append((time, int(event.get("step", 0)), float(event.get("blocked", 0.0))))
        elif kind in ENDS:
            if current is not None:
                current.ended, current.finished = time, kind != "failed"
                current = None
            else:
                close(time)
            phase, since = ("idle" if kind != "done" else ""), time
    if now is not None:
        if current is not None:
            current.ended, current.finished = now, True
        else:
            close(now)
    _divide(spans, result)
    return result


def _requeued(before: str, job_start: str) -> bool:
    """Return whether a job left the queue again. Job starts on one machine (`pid-...`) are started by the user."""
    return bool(before) and before != job_start and not job_start.startswith("pid-")


def _divide(spans: list[_TrainingSpan], result: Goodput) -> None:
    """Divide training spans: time is lost if the next attempt had to repeat its steps."""
    for index, span in enumerate(spans):
        ended = span.ended or span.began
        useful_until = ended
        if index + 1 < len(spans):
            resumed = spans[index + 1].step
            useful_until = min(
                [time for time, step, _ in span.saves if step >= resumed] or [ended if span.finished else 0.0]
            )
            if resumed <= span.step and not span.finished:
                useful_until = span.began
        useful_until = min(max(useful_until, span.began), ended)
        saving = sum(blocked for time, _, blocked in span.saves if time <= useful_until)
        saving = min(saving, useful_until - span.began)
        result.seconds["saving"] += saving
        result.seconds["training"] += useful_until - span.began - saving
        result.seconds["lost"] += ended - useful_until
