"""How an attempt ends: which rank failed first, how the others are ended, and what is left in writing."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent import restart_policy
from paceline.agent.health.heartbeat import Beats
from paceline.agent.workers import processes
from paceline.agent.workers.group import WorkerGroup
from paceline.contract.heartbeat_file import RUNNING, SAVED_AND_STOPPED
from paceline.contract.run_folder import AttemptFolder, write_atomically
from paceline.contract.verdict import DONE, FAILED, STOPPED, STOPPED_EXIT

INTERRUPTED = "interrupted"  # a cause beside those of `relaunch`: somebody pressed Ctrl-C
ENDED_BY_STOP = -signal.SIGUSR1  # a script that took the signal's default action back
ENDED_BY_TERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
# A rank whose end these words explain died of another rank's death.
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection (closed|refused|reset)|DistNetworkError|DistStoreError"
    r"|remote process exited|NCCL communicator was aborted|Socket Timeout|recvBytes|sendBytes",
    re.IGNORECASE,
)
QUICK_KILL = 1.0  # seconds for a rank that uses the runtime: SIGTERM ends it at once, unless it is stuck in C


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in an attempt."""

    cause: str
    host: str
    rank: int | None = None
    code: int | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    step: int | None = None
    time: float = 0.0
    log: str = ""

    @property
    def is_consequence(self) -> bool:
        return self.cause == restart_policy.ERROR and bool(CONSEQUENCE.search(f"{self.type}: {self.message}"))

    @property
    def error(self) -> str:
        """What tells two failures apart, in one line."""
        if self.type:
            return f"{self.type}: {self.message}".splitlines()[0]
        return self.how()

    def how(self) -> str:
        """What happened, without who."""
        return processes.describe_exit(self.code) if self.code is not None else self.message

    def headline(self, world_size: int) -> str:
        if self.rank is None:
            return f"node {self.host} failed: {self.message}"
        return f"rank {self.rank} of {world_size} on host {self.host} failed: {self.how()}"

    def text(self, world_size: int, *, with_trace: bool) -> str:
        """For the console. A traceback that stood there already is not repeated."""
        lines = [self.headline(world_size)]
        if with_trace and self.traceback:
            lines.append(self.traceback.rstrip())
        if self.log:
            lines.append(f"its log: {self.log}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    time: float
    state: int
    step: int
    failure: Failure | None = None


def failure_of(
    attempt: AttemptFolder,
    *,
    rank: int,
    host: str,
    code: int,
    when: float,
    step: int | None,
    log: Path,
    tail: str,
) -> Failure:
    """What is known of a rank that failed: its own report if it left one, else the end of its log."""
    try:
        told = json.loads(attempt.error(rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = {}
    code = int(told.get("code", code))  # of a process that this agent has not started itself
    cause = restart_policy.ERROR
    if code < 0:
        name = processes.signal_name(-code)
        cause = restart_policy.CRASH if name in restart_policy.CRASH_SIGNALS else restart_policy.KILLED
    plain = Failure(cause, host, rank, code, step=step, time=when, log=str(log), traceback=_last_lines(tail))
    try:
        return replace(
            plain, type=str(told["type"]), message=str(told["message"]),
            traceback=str(told["traceback"]) or plain.traceback, time=min(when, float(told["time"])),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return plain


def _last_lines(tail: str, count: int = 20) -> str:
    return "\n".join(tail.splitlines()[-count:])


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The one that the others follow from: a lost connection comes after whatever cut it, whenever it was seen."""
    return min(failures, key=lambda each: (each.is_consequence, each.time), default=None)


def verdict_of(ends: Iterable[RankEnd], *, failed: bool, stop_asked: bool) -> str:
    """Of the whole attempt, all ranks of all nodes."""
    if failed:
        return FAILED
    stopped = False
    for end in ends:
        saved = end.code == STOPPED_EXIT or (end.code == 0 and end.state == SAVED_AND_STOPPED)
        if saved or (stop_asked and end.code in (*ENDED_BY_TERM, ENDED_BY_STOP)):
            stopped = True
        elif end.code != 0:
            return FAILED
    return STOPPED if stopped else DONE


class Ending:
    """Ends the ranks of this node: SIGTERM, and SIGKILL to the whole group of whoever has not gone in time."""

    def __init__(self, starter: WorkerGroup, beats: Beats, *, kill_after: float) -> None:
        self._starter = starter
        self._beats = beats
        self._kill_after = kill_after
        self.since: float | None = None
        self.killed: set[int] = set()  # local ranks

    @property
    def begun(self) -> bool:
        return self.since is not None

    def begin(self) -> None:
        if self.since is not None:
            return
        self.since = time.monotonic()
        self._beats.say_ending()
        for pid in self._starter.pids().values():
            processes.send_signal(pid, signal.SIGTERM)

    def hurry(self) -> None:
        """At once, then."""
        self.begin()
        self._kill_after = 0.0
        self.tick()

    def tick(self) -> None:
        if self.since is None:
            return
        waited = time.monotonic() - self.since
        for local_rank, pid in self._starter.pids().items():
            uses_runtime = self._beats.read(local_rank).state >= RUNNING
            patience = min(self._kill_after, QUICK_KILL) if uses_runtime else self._kill_after
            if waited >= patience:
                self.killed.add(local_rank)
                processes.signal_group(pid, signal.SIGKILL)
                processes.send_signal(pid, signal.SIGKILL)


def write_failure(attempt: AttemptFolder, failure: Failure) -> None:
    write_atomically(attempt.failure, json.dumps(asdict(failure), indent=1) + "\n")


def end_to_json(end: RankEnd) -> dict[str, Any]:
    return asdict(end)


def end_from_json(told: dict[str, Any]) -> RankEnd:
    failure = told.pop("failure")
    return RankEnd(**told, failure=Failure(**failure) if failure else None)
