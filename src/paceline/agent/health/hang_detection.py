"""The watchdog: finds ranks that hang, from the heartbeats of all nodes.

Agents send ages, not times, because the clocks of nodes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.stacks import Stack

REPORT_INTERVAL = 1.0  # seconds between the reports that a member sends to the head agent
REPORT = "heartbeats"  # the kind of such a message
_HELD = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "D": "waiting for a device or a file system",
}
_SAME_MOMENT = 0.5  # seconds; heartbeats closer than this do not show which rank was late


@dataclass(frozen=True)
class RankHeartbeat:
    """A rank's heartbeat, in a form that other nodes understand."""

    rank: int
    state: int  # of `contract.heartbeat_file`: READY, RUNNING ...
    step: int
    age: float  # seconds since the last heartbeat; of a rank that is READY, without any activity
    host: str = ""
    process: str = ""  # the kernel's state letter of the rank's process, if known


@dataclass(frozen=True)
class Hang:
    """No rank makes progress. The ranks in `stuck` are the likely cause; the rest wait for them."""

    stuck: list[RankHeartbeat]
    seconds: float  # without progress
    step: int
    running: int = 0  # how many ranks train, stuck or waiting
    # if stacks tell: those that are not where the others wait
    absent: tuple[RankHeartbeat, ...] = ()
    where: str = ""  # the line at which the first of them is

    @property
    def first(self) -> RankHeartbeat:
        """The rank to name."""
        return self.absent[0] if self.absent else self.stuck[0]

    def compare_stacks(
        self, heartbeats: Iterable[RankHeartbeat], stacks: Mapping[int, Stack]
    ) -> Hang:
        """Return the hang with the ranks that are outside of any collective, if others wait in
        one.
        """
        known = [heartbeat for heartbeat in heartbeats if heartbeat.rank in stacks]
        absent = [heartbeat for heartbeat in known if not stacks[heartbeat.rank].waits_in]
        if not absent or len(absent) == len(known):
            return self
        absent.sort(key=lambda heartbeat: heartbeat.rank)
        return replace(self, absent=tuple(absent), where=stacks[absent[0].rank].where)

    def __str__(self) -> str:
        names = ", ".join(f"rank {each.rank} on {each.host}" for each in self.absent[:8])
        have = "have" if len(self.absent) > 1 else "has"
        absent = f"{names} {have} not reached the point where the others wait ({self.where})"
        if self.stuck[0].state == READY:
            count = f"{len(self.stuck)} ranks" if len(self.stuck) > 1 else "the rank"
            text = (
                f"{count} printed nothing and used almost no CPU time, disk or network for "
                f"{self.seconds:.0f} s"
            )
            return f"{text}; {absent}" if self.absent else text
        if self.absent:
            return f"no progress for {self.seconds:.0f} s at step {self.step}; {absent}"
        if len(self.stuck) == self.running > 1 and not any(
            each.process in _HELD for each in self.stuck
        ):
            who = (
                f"all {self.running} ranks are stuck at step {self.step}, none longer than the "
                "others"
            )
            return f"no progress for {self.seconds:.0f} s; {who}: compare their stacks"
        ranks = "; ".join(_describe(heartbeat) for heartbeat in self.stuck[:8])
        return f"no progress for {self.seconds:.0f} s; {ranks}"


def _describe(heartbeat: RankHeartbeat) -> str:
    host = f" on {heartbeat.host}" if heartbeat.host else ""
    reason = f" ({_HELD[heartbeat.process]})" if heartbeat.process in _HELD else ""
    return f"rank {heartbeat.rank}{host} is stuck at step {heartbeat.step}{reason}"


class Watchdog:
    """Reports a hang once a training rank sends no heartbeat for `timeout` seconds; 0 turns it off.

    Of ranks that have begun a step, only those in state RUNNING count: one that has saved or
    finished sends nothing more. Before that, and in a script without step boundaries, ranks may
    compile or load for as long as they like; they hang if none of them does anything at all.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def check(self, heartbeats: Iterable[RankHeartbeat]) -> Hang | None:
        known = list(heartbeats)
        running = [heartbeat for heartbeat in known if heartbeat.state == RUNNING]
        if self.timeout <= 0 or not known:
            return None
        if not running:
            idle = min(heartbeat.age for heartbeat in known)
            is_hang = idle > self.timeout and all(heartbeat.state == READY for heartbeat in known)
            return (
                Hang(sorted(known, key=lambda heartbeat: heartbeat.rank), idle, 0)
                if is_hang
                else None
            )
        oldest = max(heartbeat.age for heartbeat in running)
        if oldest <= self.timeout:
            return None
        return Hang(
            find_stuck(running), oldest, min(heartbeat.step for heartbeat in running), len(running)
        )


def find_stuck(running: list[RankHeartbeat]) -> list[RankHeartbeat]:
    """Return the ranks that the others wait for.

    These are the ones that the kernel holds; otherwise those at the lowest step; of those, the ones
    with the oldest heartbeat.
    """
    held = [heartbeat for heartbeat in running if heartbeat.process in _HELD]
    if held and len(held) < len(running):
        return held
    lowest = min(heartbeat.step for heartbeat in running)
    behind = [heartbeat for heartbeat in running if heartbeat.step == lowest]
    oldest = max(heartbeat.age for heartbeat in behind)
    return sorted(
        (heartbeat for heartbeat in behind if oldest - heartbeat.age <= _SAME_MOMENT),
        key=lambda heartbeat: (-heartbeat.age, heartbeat.rank),
    )


class ClusterHeartbeats:
    """The head agent's view of all ranks: its own, and the reports that members send about once a
    second.
    """

    def __init__(self) -> None:
        self._reported: dict[int, list[RankHeartbeat]] = {}

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a member's report."""
        self._reported[int(message["from"])] = [
            RankHeartbeat(*fields) for fields in message["heartbeats"]
        ]

    def all(self, own: Iterable[RankHeartbeat]) -> list[RankHeartbeat]:
        """Return all ranks. A late report makes no rank older: a busy network is not a hang."""
        return [
            *own,
            *(heartbeat for reported in self._reported.values() for heartbeat in reported),
        ]


def make_report(heartbeats: Iterable[RankHeartbeat]) -> dict[str, Any]:
    """Return the message with which a member reports its ranks to the head agent."""
    rows = [[h.rank, h.state, h.step, round(h.age, 3), h.host, h.process] for h in heartbeats]
    return {"kind": REPORT, "heartbeats": rows}


def process_state(pid: int) -> str:
    """Return the kernel's state letter of a process (R, S, D, T, Z ...); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
