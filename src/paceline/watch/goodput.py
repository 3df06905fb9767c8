"""How the periods of a run divide into categories and their parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from paceline.contract.foreign_records import read_tail
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.watch import origin
from paceline.watch.events import ENDS, QUEUED, find_end
from paceline.watch.node_usage import read_first_rank
from paceline.watch.periods import JobStart, Period, PeriodReader, TrainingLog

UNMEASURED = "unmeasured"  # the part of a start that has not been divided
SHARES = ("queued", "starting", "running", "training", "saving", "lost", "idle")
PARTS = {
    # Agents meet and check their nodes; data is copied to the nodes; ranks start and import; they
    # find each other; a checkpoint is loaded; the script sets up the rest; its first batch; its
    # first step, as far as it is longer than others. Rank 0 says how long these took at its first
    # step boundary; until then, nobody knows.
    "starting": (
        "agents",
        "staging",
        "import",
        "rendezvous",
        "restore",
        "setup",
        "first_batch",
        "compile",
        UNMEASURED,
    ),
    "training": ("compute", "data"),  # waiting for data is the other one
}
RENDEZVOUS = ("device", "rendezvous", "context", "process_group")  # phases of a start


@dataclass(frozen=True)
class Span:
    """A part of a run's time line."""

    kind: str  # of `SHARES`
    began: float
    ended: float
    attempt: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Piece:
    """A period, divided: its spans, and the seconds of their parts."""

    spans: list[Span]
    parts: dict[str, dict[str, float]]


def divide(periods: Sequence[Period]) -> list[Piece]:
    """Divide all periods. Steps are lost if the next attempt that trains has to repeat them.

    An attempt may have several sessions, such as folds. All but its last are over, and nobody
    repeats them. That one continues in the first session of the next attempt that has something
    left to do.
    """
    pieces = []
    resumed_at: int | None = None
    for index in range(len(periods) - 1, -1, -1):
        period = periods[index]
        if period.log is not None:
            log = period.log
            pieces.append(_divide_training(period, log, None if log.is_followed else resumed_at))
            if not (log.is_followed and log.has_no_step):
                resumed_at = log.step
        elif period.kind == "starting":
            after = periods[index + 1] if index + 1 < len(periods) else None
            pieces.append(_divide_start(period, after.log if after is not None else None))
        else:
            pieces.append(Piece([_span(period, period.kind, period.began, period.ended)], {}))
    return pieces[::-1]


def _divide_start(period: Period, log: TrainingLog | None) -> Piece:
    """Divide a start by the phases that rank 0 has measured until its first step boundary."""
    span = _span(period, "starting", period.began, period.ended)
    if period.part != "ranks":
        return Piece([span], {"starting": {period.part: span.seconds}})
    if log is None or not log.phases:
        return Piece([span], {"starting": {UNMEASURED: span.seconds}})
    measured = {
        "rendezvous": sum(log.phases.get(name, 0.0) for name in RENDEZVOUS),
        "restore": log.phases.get("restore", 0.0),
        "setup": log.phases.get("setup", 0.0),
    }
    shrunk = min(1.0, span.seconds / total) if (total := sum(measured.values())) else 1.0
    parts = {name: seconds * shrunk for name, seconds in measured.items()}
    return Piece(
        [span], {"starting": {"import": max(0.0, span.seconds - sum(parts.values())), **parts}}
    )


def _divide_training(period: Period, log: TrainingLog, resumed_at: int | None) -> Piece:
    # without the end of a step
    has_left_loop = log.left is not None or (log.is_finished and not log.is_live)
    if log.is_in_first_step and not has_left_loop:
        return _divide_first_step(period, log)
    ended = period.ended if log.left is None else min(max(log.left, period.began), period.ended)
    first_batch = min(log.phases.get("first_batch", 0.0), ended - period.began)
    compiled = min(_compilation(period, log), ended - period.began - first_batch)
    began = min(ended, period.began + first_batch + compiled)
    useful_until = min(max(_useful_until(period, log, resumed_at), began), ended)
    spans = [_span(period, "starting", period.began, began)]
    at = began
    for time, _, blocked in log.saves:
        if time > useful_until:
            break
        begins = max(at, time - blocked)
        if begins < time:
            spans += [_span(period, "training", at, begins), _span(period, "saving", begins, time)]
            at = time
    rest = "idle" if _was_saved(log, resumed_at) else "lost"
    spans += [_span(period, "training", at, useful_until), _span(period, rest, useful_until, ended)]
    spans.append(_span(period, "idle", ended, period.ended))
    training = sum(span.seconds for span in spans if span.kind == "training")
    waited = min(training, max(0.0, _waited(log, useful_until) - _waited(log, began)))
    starting = began - period.began
    parts = {
        "starting": {
            "first_batch": min(first_batch, starting),
            "compile": max(0.0, starting - first_batch),
        },
        "training": {"compute": training - waited, "data": waited},
    }
    return Piece(spans, parts)


def _divide_first_step(period: Period, log: TrainingLog) -> Piece:
    """Divide a period that has not reached the end of its first step: it waits for the batch, or
    compiles.
    """
    came = min(max(log.first_batch or period.ended, period.began), period.ended)
    parts = {"first_batch": came - period.began, "compile": period.ended - came}
    return Piece([_span(period, "starting", period.began, period.ended)], {"starting": parts})


def _useful_until(period: Period, log: TrainingLog, resumed_at: int | None) -> float:
    """Return the time after which steps had to be repeated."""
    if resumed_at is None:
        return period.ended
    if resumed_at <= log.step and not log.is_finished:
        return period.began
    saves = [time for time, step, _ in log.saves if step >= resumed_at]
    return min(saves, default=period.ended if log.is_finished else period.began)


def _was_saved(log: TrainingLog, resumed_at: int | None) -> bool:
    """Return whether all steps of an attempt that stopped were saved: after that, it shut down."""
    return (
        resumed_at is not None
        and log.is_finished
        and all(step <= resumed_at for _, step in log.steps)
    )


def _compilation(period: Period, log: TrainingLog) -> float:
    """Return by how much the first step was longer than a normal one; 0 if the run had no other.

    While the second one runs, it is as long as it is by now.
    """
    first = log.first_step
    if first is None:
        return 0.0
    done = next((step for time, step in log.steps if time >= first), log.step + 1)
    later = [(time, step) for time, step in log.steps if step > done and time > first]
    if not later and not log.is_live:
        return 0.0
    time, step = later[-1] if later else (period.ended, done + 1)
    blocked = sum(each for saved, _, each in log.saves if first < saved <= time)
    normal = max(0.0, time - first - blocked) / (step - done)
    return max(0.0, log.phases.get("first_step", 0.0) - normal)


def _waited(log: TrainingLog, time: float) -> float:
    """Return the seconds for which rank 0 had waited for data, between the times at which it
    told.
    """
    points = _rising(log.waits)
    for (left, before), (right, after) in pairwise(points):
        if left <= time <= right:
            return before + (after - before) * (time - left) / (right - left)
    if not points or time < points[0][0]:
        return points[0][1] if points else 0.0
    (first, start), (last, end) = points[0], points[-1]
    # nobody told later: it went on as before
    rate = (end - start) / (last - first) if last > first else 0.0
    return end + rate * (time - last)


def _rising(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points whose times and values rise, without those that do not."""
    kept: list[tuple[float, float]] = []
    for time, value in points:
        if not kept or (time > kept[-1][0] and value >= kept[-1][1]):
            kept.append((time, value))
    return kept


def _span(period: Period, kind: str, began: float, ended: float) -> Span:
    return Span(kind, began, ended, period.attempt)


MAX_SPANS = 1000  # of a time line
WITH_RANKS = ("starting", "running", "training", "saving", "lost")


@dataclass
class Goodput:
    """Seconds per category, in all and by part; `total` is the run's wall time so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    parts: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: dict.fromkeys(parts, 0.0) for name, parts in PARTS.items()}
    )
    attempts: int = 0
    failures: int = 0
    timeline: list[Span] = field(default_factory=list)
    job_starts: list[JobStart] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def seconds_between_failures(self) -> float | None:
        """The mean time that the run had nodes, per failure; None without one."""
        return (
            sum(self.seconds[name] for name in WITH_RANKS) / self.failures
            if self.failures
            else None
        )

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0


def compute_goodput(events: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Divide a run's wall time into categories, until `now`, if its last event is not its end.

    For a run that is still active, that is the current time; for others, see `find_end`.
    """
    reader = PeriodReader()
    reader.read(events, now)
    result = Goodput(
        attempts=len(reader.attempts), failures=reader.failures, job_starts=reader.job_starts
    )
    for piece in divide(reader.periods):
        for span in piece.spans:
            result.seconds[span.kind] += span.seconds
            result.timeline.append(span)
        for name, parts in piece.parts.items():
            for part, seconds in parts.items():
                result.parts[name][part] += seconds
    result.timeline = _join(result.timeline)
    return result


def _join(spans: Iterable[Span]) -> list[Span]:
    """Return a time line with at most about `MAX_SPANS` spans: neighbours of a kind become one,
    short saves go.
    """
    joined = _join_neighbours(span for span in spans if span.ended > span.began)
    if len(joined) <= MAX_SPANS:
        return joined
    shortest = (joined[-1].ended - joined[0].began) / MAX_SPANS
    kept: list[Span] = []
    for span in joined:
        touches = kept and kept[-1].ended == span.began and kept[-1].attempt == span.attempt
        if touches and span.kind == "saving" and span.seconds < shortest:
            kept[-1] = Span(kept[-1].kind, kept[-1].began, span.ended, span.attempt)
        else:
            kept.append(span)
    return _join_neighbours(kept)


def _join_neighbours(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and (joined[-1].kind, joined[-1].attempt, joined[-1].ended) == (
            span.kind,
            span.attempt,
            span.began,
        ):
            joined[-1] = Span(span.kind, joined[-1].began, span.ended, span.attempt)
        else:
            joined.append(span)
    return joined


TAIL = 16384  # bytes of the list of requeues

Event = dict[str, Any]


def read_goodput(
    folder: RunFolder, events: Sequence[Event], *, is_over: bool, is_waiting: bool = False
) -> Goodput:
    """Return where the time of a run went so far. `is_waiting`: Slurm has its job in the queue."""
    is_waiting = not is_over and (is_waiting or _is_requeued(folder, events))
    more = [
        *_signs_of_life(folder, events, is_waiting=is_waiting),
        *(() if is_over else _progress(folder)),
    ]
    known = sorted([*events, *more], key=lambda event: float(event["time"]))
    if is_waiting and _newest_start(known):  # nothing that its last start did is later
        known.append({"time": known[-1]["time"], "event": "requeued"})
    return compute_goodput(known, find_end(folder, events) if is_over else origin.now())


def _newest_start(events: Sequence[Event]) -> Event:
    """Return the arrival of the newest head agent; empty if there is none, or if the run was
    submitted again since.
    """
    for event in reversed(events):
        if event["event"] in QUEUED:
            return {}
        if event["event"] == "node" and event.get("index", 0) == 0:
            return event
    return {}


def _is_requeued(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Return whether the newest start of a job has ended with a requeue. Each line of the file is
    `TIME JOB-START`.
    """
    try:
        lines = read_tail(folder.requeues, TAIL).decode(errors="replace").split("\n")
    except OSError:
        return False
    names = [line.partition(" ")[2].strip() for line in lines]
    return any(names) and [name for name in names if name][-1] == _newest_start(events).get(
        "job_start"
    )


def _signs_of_life(
    folder: RunFolder, events: Sequence[Event], *, is_waiting: bool
) -> Iterator[Event]:
    """Yield when the ranks of an attempt last wrote to their logs, if it was killed and could not
    write its end.
    """
    launches = [
        event for event in events if event["event"] in ("launch", "ranks") and "attempt" in event
    ]
    started = {event["attempt"] for event in launches}
    ended = {event.get("attempt") for event in events if event["event"] in ENDS}
    newest = max(launches, key=lambda event: event["attempt"], default=None)
    start = _newest_start(events)
    if newest is not None and not is_waiting and start.get("time", 0.0) <= newest["time"]:
        ended.add(newest["attempt"])  # it may still run
    for number in sorted(started - ended):
        if times := _log_times(folder.attempt(number)):
            yield {"time": max(times), "event": "alive", "attempt": number}


def last_output(folder: RunFolder) -> float:
    """Return when a rank of the newest attempt last printed something; 0 if none has."""
    return max(
        (time for attempt in folder.attempts()[-1:] for time in _log_times(attempt)), default=0.0
    )


def _log_times(attempt: AttemptFolder) -> list[float]:
    try:
        with os.scandir(attempt.path) as entries:
            return [entry.stat().st_mtime for entry in entries if entry.name.endswith(".log")]
    except OSError:
        return []


def _progress(folder: RunFolder) -> Iterator[Event]:
    """Yield how far rank 0 of a live run is, and how long it has waited for data, as its agent saw
    it last.
    """
    if (sample := read_first_rank(folder)) is not None:
        yield {
            "time": sample.time,
            "event": "progress",
            "step": sample.step,
            "waited": sample.waited,
        }
