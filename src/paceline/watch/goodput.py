"""How the periods of a run divide into categories and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.contract.run_folder import RunFolder
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
MAX_SPANS = 1000  # of a time line
WITH_RANKS = ("starting", "running", "training", "saving", "lost")
RENDEZVOUS = ("device", "rendezvous", "process_group")  # phases of a start


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
        had_nodes = sum(self.seconds[name] for name in WITH_RANKS)
        return had_nodes / self.failures if self.failures else None

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "total": self.total,
            "parts": self.parts,
            "failures": self.failures,
            "seconds_between_failures": self.seconds_between_failures,
        }

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0

    def add(self, span: Span) -> None:
        self.seconds[span.kind] += span.seconds
        self.timeline.append(span)

    def add_parts(self, kind: str, parts: Mapping[str, float]) -> None:
        for name, seconds in parts.items():
            self.parts[kind][name] += seconds


def compute_goodput(events: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Divide a run's wall time into categories, until `now`, if its last event is not its end.

    For a run that is still active, that is the current time; for others, see `find_end`.
    """
    reader = PeriodReader()
    reader.read(events, now)
    result = Goodput(
        attempts=len(reader.attempts), failures=reader.failures, job_starts=reader.job_starts
    )
    resumptions = _resumptions(reader.periods)
    for number, period in enumerate(reader.periods):
        if period.log is not None:
            _divide_training(result, period, period.log, resumptions[number])
        else:
            result.add(Span(period.kind, period.began, period.ended, period.attempt))
            if period.kind == "starting":
                logs = [each.log for each in reader.periods[number + 1 : number + 2]]
                result.add_parts("starting", _divide_start(period, next(iter(logs), None)))
    result.timeline = _join(result.timeline)
    return result


def _resumptions(periods: Sequence[Period]) -> list[int | None]:
    """Return from which step on each period's training was repeated; None if it was not.

    An attempt may have several sessions, such as folds. All but its last are over, and nobody
    repeats them. That one continues in the first session of the next attempt that has something
    left to do.
    """
    found: list[int | None] = []
    resumed_at: int | None = None
    for period in reversed(periods):
        log = period.log
        found.append(None if log is None or log.is_followed else resumed_at)
        if log is not None and not (log.is_followed and log.has_no_step):
            resumed_at = log.step
    return found[::-1]


def _divide_start(period: Period, log: TrainingLog | None) -> dict[str, float]:
    """Divide a start by the phases that rank 0 has measured until its first step boundary."""
    seconds = period.ended - period.began
    if period.part != "ranks" or log is None or not log.phases:
        return {UNMEASURED if period.part == "ranks" else period.part: seconds}
    measured = {
        "rendezvous": sum(log.phases.get(name, 0.0) for name in RENDEZVOUS),
        "restore": log.phases.get("restore", 0.0),
        "setup": log.phases.get("setup", 0.0),
    }
    shrunk = min(1.0, seconds / total) if (total := sum(measured.values())) else 1.0
    parts = {name: each * shrunk for name, each in measured.items()}
    return {"import": max(0.0, seconds - sum(parts.values())), **parts}


def _divide_training(
    result: Goodput, period: Period, log: TrainingLog, resumed_at: int | None
) -> None:
    """Divide a session: its first batch and compilation belong to the start, what had to be
    repeated is lost, and rank 0 waits for data in a part of the rest.
    """

    def add(kind: str, began: float, ended: float) -> None:
        result.add(Span(kind, began, ended, period.attempt))

    # without the end of a step
    has_left_loop = log.left is not None or (log.is_finished and not log.is_live)
    if log.is_in_first_step and not has_left_loop:  # it waits for the batch, or compiles
        came = min(max(log.first_batch or period.ended, period.began), period.ended)
        parts = {"first_batch": came - period.began, "compile": period.ended - came}
        add("starting", period.began, period.ended)
        result.add_parts("starting", parts)
        return
    ended = period.ended if log.left is None else min(max(log.left, period.began), period.ended)
    first_batch = min(log.phases.get("first_batch", 0.0), ended - period.began)
    compiled = min(_compilation(period, log), ended - period.began - first_batch)
    began = min(ended, period.began + first_batch + compiled)
    useful_until = min(max(_useful_until(period, log, resumed_at), began), ended)
    add("starting", period.began, began)
    result.add_parts("starting", {"first_batch": first_batch, "compile": max(0.0, compiled)})
    at, training = began, 0.0
    for time, _, blocked in log.saves:
        begins = max(at, time - blocked)
        if time <= useful_until and begins < time:
            add("training", at, begins)
            add("saving", begins, time)
            training += begins - at
            at = time
    add("training", at, useful_until)
    training += useful_until - at
    add("idle" if _was_saved(log, resumed_at) else "lost", useful_until, ended)
    add("idle", ended, period.ended)
    waited = min(training, max(0.0, _waited(log, useful_until) - _waited(log, began)))
    result.add_parts("training", {"compute": training - waited, "data": waited})


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
    """Return the seconds for which rank 0 had waited for data, between the times at which it told.
    After the last one, it went on as before.
    """
    points = _rising(log.waits)
    if len(points) < 2 or time < points[0][0]:
        return points[0][1] if points else 0.0
    later = [number for number, (when, _) in enumerate(points) if number and when >= time]
    first, second = (later[0] - 1, later[0]) if later else (0, -1)
    (left, before), (right, after) = points[first], points[second]
    return before + (after - before) * (time - left) / (right - left)


def _rising(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points whose times and values rise, without those that do not."""
    kept: list[tuple[float, float]] = []
    for time, value in points:
        if not kept or (time > kept[-1][0] and value >= kept[-1][1]):
            kept.append((time, value))
    return kept


def _join(spans: Iterable[Span]) -> list[Span]:
    """Return a time line with at most about `MAX_SPANS` spans: neighbours of a kind become one,
    short saves go.
    """
    known = [span for span in spans if span.ended > span.began]
    shortest = (known[-1].ended - known[0].began) / MAX_SPANS if len(known) > MAX_SPANS else 0.0
    joined: list[Span] = []
    for span in known:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.attempt, last.ended) == (span.attempt, span.began)
            and (last.kind == span.kind or (span.kind == "saving" and span.seconds < shortest))
        ):
            joined[-1] = replace(last, ended=span.ended)
        else:
            joined.append(span)
    return joined


Event = dict[str, Any]


def read_goodput(
    folder: RunFolder, events: Sequence[Event], *, is_over: bool, is_waiting: bool = False
) -> Goodput:
    """Return where the time of a run went so far. `is_waiting`: Slurm has its job in the queue."""
    more = list(_signs_of_life(folder, events, is_waiting=is_waiting))
    if not is_over and (seen := read_first_rank(folder)) is not None:
        # how far a live run is, and how long it has waited for data
        about = {"event": "progress", "step": seen.step, "waited": seen.waited}
        more.append({"time": seen.time, **about})
    known = sorted([*events, *more], key=lambda event: float(event["time"]))
    if is_waiting and not is_over and _newest_start(known):  # nothing that it did is later
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


def _signs_of_life(
    folder: RunFolder, events: Sequence[Event], *, is_waiting: bool
) -> Iterator[Event]:
    """Yield when the ranks of an attempt last wrote to their logs, if it was killed and could not
    write its end.
    """
    launches = {
        event["attempt"]: event["time"]
        for event in events
        if event["event"] in ("launch", "ranks") and "attempt" in event
    }
    ended = {event.get("attempt") for event in events if event["event"] in ENDS}
    newest = max(launches, default=0)
    if launches and not is_waiting and _newest_start(events).get("time", 0.0) <= launches[newest]:
        ended.add(newest)  # it may still run
    for number in sorted(launches.keys() - ended):
        if written := folder.attempt(number).last_output():
            yield {"time": written, "event": "alive", "attempt": number}


def last_output(folder: RunFolder) -> float:
    """Return when a rank of the newest attempt last printed something; 0 if none has."""
    return next((each.last_output() or 0.0 for each in folder.attempts()[-1:]), 0.0)
