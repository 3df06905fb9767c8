"""Hangs: finds ranks that make no progress, from the heartbeats of all nodes, and dumps stacks.

Agents send ages, not times, because the clocks of nodes differ.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent import retry_policy
from paceline.agent.health.heartbeat import ActivityMonitor, Heartbeats
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Launch
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.stacks import Stack, read_stack

DUMP_END = 1 << 16  # bytes of a stack file
STACKS_TIMEOUT = 2.0  # seconds for hung ranks to write their stacks
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


def find_hang(heartbeats: Iterable[RankHeartbeat], timeout: float) -> Hang | None:
    """Return a hang once a training rank has sent no heartbeat for this long; 0 turns it off.

    Of ranks that have begun a step, only those in state RUNNING count: one that has saved or
    finished sends nothing more. Before that, and in a script without step boundaries, ranks may
    compile or load for as long as they like; they hang if none of them does anything at all.
    """
    known = sorted(heartbeats, key=lambda heartbeat: heartbeat.rank)
    running = [heartbeat for heartbeat in known if heartbeat.state == RUNNING]
    if timeout <= 0 or not known:
        return None
    if not running:
        idle = min(heartbeat.age for heartbeat in known)
        is_hang = idle > timeout and all(heartbeat.state == READY for heartbeat in known)
        return Hang(known, idle, 0) if is_hang else None
    oldest = max(heartbeat.age for heartbeat in running)
    if oldest <= timeout:
        return None
    step = min(heartbeat.step for heartbeat in running)
    return Hang(find_stuck(running), oldest, step, len(running))


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


class HangReporter:
    """One agent's part: a member reports its ranks to the head agent, which looks for a hang."""

    def __init__(
        self,
        launch: Launch,
        *,
        output: OutputCapture,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
    ) -> None:
        self._launch = launch
        self._heartbeats, self._rendezvous = heartbeats, rendezvous
        self._rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        self._timeout = launch.launch_spec.hang_timeout
        # of other agents, about once a second; a late report makes no rank older
        self._reported: dict[int, list[RankHeartbeat]] = {}
        self._activity = ActivityMonitor(
            heartbeats,
            self._timeout,
            count_output=lambda local_rank: output.count_bytes(self._rank_of[local_rank]),
        )
        # local ranks that have not begun a step, and may never
        self._idle_since: dict[int, float] = {}
        self._last_check = 0.0

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a member's report."""
        self._reported[int(message["from"])] = [
            RankHeartbeat(*fields) for fields in message["heartbeats"]
        ]

    def check(self, local_ranks: Collection[int]) -> Failure | None:
        """Report these ranks to the head agent; on the head agent, return a hang and dump all
        stacks.
        """
        now = time.monotonic()
        if not self._timeout or now - self._last_check < REPORT_INTERVAL:
            return None
        self._last_check = now
        self._check_activity(local_ranks, now)
        own = [self._heartbeat(local_rank, now) for local_rank in sorted(local_ranks)]
        if not self._launch.placement.is_head:
            rows = [astuple(replace(each, age=round(each.age, 3))) for each in own]
            self._rendezvous.send({"kind": REPORT, "heartbeats": rows})
            return None
        known = [*own, *(each for reported in self._reported.values() for each in reported)]
        hang = find_hang(known, self._timeout)
        if hang is None:
            return None
        # before the stacks are dumped: a rank that crashes meanwhile is not the cause
        detected = time.time()
        self.dump_all_stacks(local_ranks)
        hang = hang.compare_stacks(known, self._read_stacks(each.rank for each in known))
        first, limit = hang.first, f"--hang-timeout {self._timeout:g}s"
        return Failure(
            retry_policy.HANG,
            first.host,
            first.rank,
            message=f"{hang} ({limit})",
            step=hang.step,
            time=detected,
            log=str(self._launch.attempt.stacks(first.rank)),
        )

    def dump_all_stacks(self, local_ranks: Collection[int]) -> None:
        """On the head agent: have all agents dump the stacks of their ranks, and dump those of
        this node.
        """
        self._rendezvous.send({"kind": "stacks"})
        self.dump_stacks(local_ranks)

    def dump_stacks(self, local_ranks: Collection[int]) -> None:
        """Ask the ranks of this node for their Python stacks, and wait until the files are
        written.
        """
        paths = {
            heartbeat.pid: self._launch.attempt.stacks(self._rank_of[heartbeat.local_rank])
            for heartbeat in map(self._heartbeats.read, local_ranks)
            if heartbeat.state >= READY and self._heartbeats.writes_stacks(heartbeat.local_rank)
        }
        for pid in paths:
            process_tree.send_signal(pid, signal.SIGCONT)  # a stopped process could not write
        request_stacks(paths)

    def _read_stacks(self, ranks: Iterable[int]) -> dict[int, Stack]:
        """Return the stacks that were dumped; those of other nodes may still be on their way."""
        stacks = {rank: read_dump(self._launch.attempt.stacks(rank)) for rank in ranks}
        return {rank: stack for rank, stack in stacks.items() if stack is not None}

    def _check_activity(self, local_ranks: Collection[int], now: float) -> None:
        """Find out since when ranks without step boundaries have been idle."""
        heartbeats = map(self._heartbeats.read, local_ranks)
        waiting = {each.local_rank: each.pid for each in heartbeats if each.state == READY}
        if waiting and self._activity.is_due(now):
            self._idle_since = {
                rank: each.since for rank, each in self._activity.check(waiting, now).items()
            }

    def _heartbeat(self, local_rank: int, now: float) -> RankHeartbeat:
        heartbeat = self._heartbeats.read(local_rank)
        age = max(0.0, time.time() - heartbeat.time)
        if heartbeat.state == READY:
            age = now - self._idle_since.get(local_rank, now)
        return RankHeartbeat(
            self._rank_of[local_rank],
            heartbeat.state,
            heartbeat.step,
            age,
            self._launch.placement.host,
            process_tree.state(heartbeat.pid) if heartbeat.pid else "",
        )


def request_stacks(paths: Mapping[int, Path]) -> list[int]:
    """Have processes write their Python stacks into these files, and return those that have.

    One without a handler would be ended by the signal. A dump is written in many pieces: it is
    complete once the file grows no more.
    """
    sizes = {
        pid: _size(path)
        for pid, path in paths.items()
        if process_tree.has_handler(pid, signal.SIGUSR2)
    }
    for pid in sizes:
        process_tree.send_signal(pid, signal.SIGUSR2)
    deadline, now = time.monotonic() + STACKS_TIMEOUT, sizes
    while True:
        before, now = now, {pid: _size(paths[pid]) for pid in sizes}
        written = [pid for pid, size in sizes.items() if now[pid] > size]
        if (len(written) == len(sizes) and now == before) or time.monotonic() > deadline:
            return written
        time.sleep(0.05)


def read_dump(path: Path) -> Stack | None:
    """Return the newest stack in a file, which is at its end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - DUMP_END))
            return read_stack(file.read().decode(errors="replace"))
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
