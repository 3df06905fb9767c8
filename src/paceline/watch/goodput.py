"""Where a run's wall time went, from its events alone.

    queued    submitted, or requeued, and not yet started
    starting  a agent runs, but no step has been trained since its ranks were started
    training  steps whose result was kept
    saving    the part of saves for which training stood still
    lost      steps that were done again, and the wait until somebody noticed that ranks had failed or hung
    idle      the rest: waiting before a relaunch, closing down

A start of another job start (a job that was requeued, by whomever) was queued since the last word of the one before.

Events that are read: `queued` (or `submitted`), `started`, `ranks`, `training` (the first step boundary of an
attempt, with the step it began from), `saving` (with `step` and `blocked` seconds), `failed`, `stopped`, `done`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARES = ("queued", "starting", "training", "saving", "lost", "idle")
ENDS = frozenset({"failed", "stopped", "done"})


@dataclass
class Goodput:
    """Seconds by share; `total` is the run's wall time so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    attempts: int = 0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0


@dataclass
class _Stretch:
    """The training part of one attempt: from its first boundary to its end."""

    began: float
    step: int
    ended: float = 0.0
    saves: list[tuple[float, int, float]] = field(default_factory=list)  # time, step, seconds blocked
    finished: bool = False  # ended by `done` or `stopped`: nothing after the last save is lost


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All writers' events in the order of time; a line torn by a crash is passed over."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("time"), (int, float)) and "event" in event:
                found.append(event)
    return sorted(found, key=lambda event: event["time"])


def compute_goodput(events: Iterable[dict[str, Any]], now: float | None = None) -> Goodput:
    """The shares of a run; `now` closes the books of one that still runs."""
    result = Goodput()
    stretches: list[_Stretch] = []
    phase, since = "", 0.0
    job_start, last = "", 0.0
    current: _Stretch | None = None

    def close(until: float) -> None:
        if phase in ("queued", "starting", "idle"):
            result.seconds[phase] += max(0.0, until - since)

    for event in events:
        kind, time = event["event"], float(event["time"])
        if kind == "started" and _requeued(job_start, str(event.get("job_start", ""))):
            if current is not None:
                current.ended, current = last, None
                phase, since = "queued", last
            elif phase in ("idle", "starting"):
                close(last)
                phase, since = "queued", last
        job_start, last = str(event.get("job_start", job_start)), time
        if kind in ("queued", "submitted", "started", "ranks"):
            after = {"submitted": "queued", "queued": "queued"}.get(kind, "starting")
            if current is not None:  # an attempt that left no word of its end
                current.ended = time
                current = None
            close(time)
            phase, since = after, time
            result.attempts += kind == "ranks"
        elif kind == "training" and current is None:
            close(time)
            current = _Stretch(began=time, step=int(event.get("step", 0)))
            stretches.append(current)
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
    _divide(stretches, result)
    return result


def _requeued(before: str, job_start: str) -> bool:
    """Legs on one machine (`pid-...`) are started by a person; those of a job come out of the queue."""
    return bool(before) and before != job_start and not job_start.startswith("pid-")


def _divide(stretches: list[_Stretch], result: Goodput) -> None:
    """Training time is what the next attempt did not have to do again."""
    for index, stretch in enumerate(stretches):
        ended = stretch.ended or stretch.began
        kept_until = ended
        if index + 1 < len(stretches):
            resumed = stretches[index + 1].step
            kept_until = min(
                [time for time, step, _ in stretch.saves if step >= resumed]
                or [ended if stretch.finished else 0.0]
            )
            if resumed <= stretch.step and not stretch.finished:
                kept_until = stretch.began
        kept_until = min(max(kept_until, stretch.began), ended)
        saving = sum(blocked for time, _, blocked in stretch.saves if time <= kept_until)
        saving = min(saving, kept_until - stretch.began)
        result.seconds["saving"] += saving
        result.seconds["training"] += kept_until - stretch.began - saving
        result.seconds["lost"] += ended - kept_until
