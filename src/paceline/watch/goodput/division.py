"""How the periods of a run divide into categories and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.watch.goodput.periods import Period, TrainingLog

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
    spans = [span for span in spans if span.ended > span.began]
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
    span = _span(period, "starting", period.began, period.ended)
    came = (
        period.ended
        if log.first_batch is None
        else min(max(log.first_batch, period.began), period.ended)
    )
    return Piece(
        [span], {"starting": {"first_batch": came - period.began, "compile": period.ended - came}}
    )


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
