"""The periods of a run, one after the other, from its events.

The events used are `queued` (or `submitted`), `node` and `started` (an agent arrives, and has met
the others),
`staging` and `staged`, `launch` and `ranks` (ranks start, and have started, with `uses_runtime`),
`training` (the first step boundary of a session, with its first step and the seconds of its start),
`first_batch`, `first_step`, `saving` (with `step`, `blocked` seconds and `waited`, the seconds for
which rank 0 has waited for data so far), `progress` (how far a live run is), `session_end` (rank 0
has left the session; its processes still have to end, or open another one),
`failed`, `stopped` and `done`.

When a requeued job starts again, the time since the last event of the previous job start counts as
queued, or only that since `queued_at`, if Slurm has said when it requeued the job; while it waits,
the event `requeued` says so. The time between the end of a run and its resumption is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.watch.events import ENDS, QUEUED

LONGEST = 1e9  # seconds of a phase
ARRIVALS = frozenset({"node", "started", "unreachable"})  # of agents
ACTIVE = frozenset({"starting", "running", "training"})
STEPS = frozenset({"first_batch", "first_step", "saving", "progress", "session_end"})


@dataclass
class TrainingLog:
    """What rank 0 tells of one session, from its first step boundary to its end. Most attempts
    have only one.
    """

    step: int  # the first one
    phases: dict[str, float]  # seconds of the start, by name
    first_batch: float | None = None  # when it came
    first_step: float | None = None  # when it ended
    # time, step, seconds blocked
    saves: list[tuple[float, int, float]] = field(default_factory=list)
    # times at which so many steps were done
    steps: list[tuple[float, int]] = field(default_factory=list)
    # times, and the seconds waited for data until then
    waits: list[tuple[float, float]] = field(default_factory=list)
    left: float | None = None  # when rank 0 left the session
    # the script has trained in another session since, such as the next fold
    is_followed: bool = False
    # ended by `done` or `stopped`, so nothing after the last save is lost
    is_finished: bool = False
    is_live: bool = False  # as far as anybody knows

    @property
    def is_in_first_step(self) -> bool:
        """Whether its first step has not ended. A script that calls `run.should_stop` does not
        tell.
        """
        return bool(self.phases) and self.has_no_step

    @property
    def has_no_step(self) -> bool:
        return self.first_step is None and all(step <= self.step for _, step in self.steps)


@dataclass
class Period:
    """A time in which a run did one thing."""

    kind: str  # queued, starting, running, training, lost or idle
    began: float
    ended: float
    attempt: int = 0
    part: str = ""  # of a start: agents, staging or ranks
    log: TrainingLog | None = None


@dataclass
class JobStart:
    """One start of a batch job, or of a local run."""

    name: str
    began: float
    ended: float
    nodes: str


class PeriodReader:
    """Reads events one by one."""

    def __init__(self) -> None:
        self.periods: list[Period] = []
        self.job_starts: list[JobStart] = []
        self.attempts: set[int] = set()
        self.failures = 0
        self._current = Period("", 0.0, 0.0)  # without a kind, nothing goes on
        self._last = 0.0

    def read(self, events: Iterable[Mapping[str, Any]], now: float | None) -> None:
        """Read all events of a run. The last period lasts until `now`, or else until the last
        event.
        """
        for event in events:
            before, time = self._last, float(event["time"])
            # Until the head agent of a job start arrives, the run does what it did before.
            known = self.job_starts[-1].name if self.job_starts else None
            is_other = event["event"] == "unreachable" or event.get("index", 0) != 0
            is_ahead = is_other and event.get("job_start", known) != known
            if event["event"] not in ARRIVALS or not is_ahead:
                self._last = max(before, time)
            self._take(event, event["event"], time, before)
        if (log := self._current.log) is not None:
            log.is_finished = log.is_live = True  # as far as anybody knows
        self._close(max(self._last, now) if now is not None else self._last)
        if self.job_starts and self.periods and self.periods[-1].kind != "queued":
            self.job_starts[-1].ended = max(self.job_starts[-1].ended, self.periods[-1].ended)

    def _take(self, event: Mapping[str, Any], name: str, time: float, before: float) -> None:
        phase, log = self._current.kind, self._current.log
        if name in QUEUED:
            self._close(before)
            self._enter("queued", time)
        elif name == "requeued":
            if phase not in ("", "queued"):  # it has not started again yet
                self.failures += phase in ACTIVE
                for start in self.job_starts[-1:]:
                    start.ended = max(start.ended, before)
                self._enter("queued", before)
        elif name in ("node", "started"):
            if event.get("index", 0) == 0:
                self._start(event, time, before)
        elif name in ("staging", "staged") and phase == "starting":
            if self._current.part in ("agents", "staging"):
                self._enter("starting", time, part="staging" if name == "staging" else "agents")
        elif name in ("launch", "ranks"):
            if 0 in event.get("ranks", [0]):
                self._start_ranks(event, name, time)
        elif name == "training" and (log is None or log.left is not None):
            self._start_training(event, time)
        elif log is not None and name in STEPS:
            _advance(log, event, name, time)
        elif name in ENDS:
            self._end(event, name, time)

    def _start(self, event: Mapping[str, Any], time: float, before: float) -> None:
        """The head agent arrives: of a new job, of one that was requeued, or in place of one that
        was killed.
        """
        name, phase = str(event.get("job_start", "")), self._current.kind
        known = self.job_starts[-1].name if self.job_starts else None
        if name == known and phase == "starting":  # `started` follows `node`
            return
        if name != known:
            self.job_starts.append(JobStart(name, time, time, str(event.get("nodelist", ""))))
            if known is not None:
                self.job_starts[-2].ended = max(self.job_starts[-2].ended, before)
        if known not in (None, name) and phase not in ("", "queued"):
            self.failures += phase in ACTIVE
            self._close(before)
            if not name.startswith("pid-"):  # a local run is started by the user
                # Until Slurm requeued the job, it had its nodes: one may have died without anybody
                # noticing.
                self._enter("lost" if phase in ACTIVE else "idle", before)
                self._enter("queued", min(max(before, float(event.get("queued_at", before))), time))
        else:
            self.failures += phase in ACTIVE and name == known
        self._enter("starting", time, part="agents")

    def _start_ranks(self, event: Mapping[str, Any], name: str, time: float) -> None:
        number = event.get("attempt", len(self.attempts) + 1)
        phase = self._current.kind
        uses_runtime = event.get("uses_runtime", True)
        if name == "ranks" and phase == "starting" and number in self.attempts and uses_runtime:
            return  # since `launch`
        if phase in ("running", "training"):
            self.failures += 1  # without an event at its end
        self.attempts.add(number)
        kind, part = ("starting", "ranks") if uses_runtime else ("running", "")
        self._enter(kind, time, part=part, attempt=number)
        for period in reversed(self.periods):  # what its agents did before it belongs to it
            if period.kind != "starting" or period.attempt or period.part == "ranks":
                break
            period.attempt = number

    def _start_training(self, event: Mapping[str, Any], time: float) -> None:
        attempt, last = self._current.attempt, self._current.log
        if last is not None and last.left is not None:
            last.is_followed = True
            self._enter("starting", last.left, part="setup", attempt=attempt)
        elif self._current.kind == "running":  # it has step boundaries after all
            self._current.kind, self._current.part = "starting", "ranks"
        self._enter("training", time, attempt=attempt)
        step = int(event.get("step", 0))
        self._current.log = TrainingLog(step, _seconds(event.get("seconds")))

    def _end(self, event: Mapping[str, Any], name: str, time: float) -> None:
        if self._current.kind in ("", "idle"):
            return
        if (log := self._current.log) is not None:
            _advance(log, event, "end", time)
            log.is_finished = name != "failed"
        self.failures += name == "failed"
        if name == "done":
            self._close(time)
        else:
            self._enter("idle", time)

    def _enter(self, kind: str, time: float, *, part: str = "", attempt: int = 0) -> None:
        self._close(time)
        self._current = Period(kind, time, time, attempt, part)

    def _close(self, time: float) -> None:
        """End the current period. Nothing else follows yet."""
        if self._current.kind:
            self._current.ended = max(self._current.began, time)
            self.periods.append(self._current)
        self._current = Period("", time, time)


def _advance(log: TrainingLog, event: Mapping[str, Any], name: str, time: float) -> None:
    """Add what an event tells of a session."""
    if name == "first_step" and log.first_step is None:
        log.first_step = time
        log.phases |= _seconds(event.get("seconds"))
        log.waits.append((time, log.phases.get("first_batch", 0.0)))
    elif name == "first_batch" and log.first_batch is None:
        log.first_batch = time
    elif name == "session_end":
        log.left = time
    elif name == "saving":
        blocked = max(0.0, float(event.get("blocked", 0.0)))
        log.saves.append((time, int(event.get("step", 0)), blocked))
    if isinstance(event.get("step"), int):
        log.steps.append((time, event["step"]))
    if name != "first_step" and "waited" in event:
        log.waits.append((time, float(event["waited"])))


def _seconds(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    known = {str(name): number for name, number in value.items() if isinstance(number, int | float)}
    return {name: min(float(number), LONGEST) for name, number in known.items() if number > 0}
