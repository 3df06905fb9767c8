"""Whether the ranks of a run make progress: each agent looks at its own, and reports them to the
head agent, which finds ranks that hang and ranks that linger.

Ranks hang if they train and send no heartbeat, or if no rank has begun a step and none does
anything. Ranks linger if they do nothing although others have exited. A rank may legitimately
outlive the others, e.g. to evaluate or to upload a model. So none of them counts as lingering as
long as one of them makes progress: the rest may wait for it. And a rank with child processes may
wait for a child.
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
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Launch, StartedRanks
from paceline.contract.heartbeat_file import READY, RUNNING, SAVED_AND_STOPPED
from paceline.contract.stacks import Stack, read_stack

# The kinds of messages: all agents begin to measure what their ranks do; what a member knows of its
# ranks.
RANK_EXITED, REPORT = KINDS = ("rank_exited", "ranks")
REPORT_INTERVAL = 1.0  # seconds between two looks at the ranks
CHECKS = 6  # of the activity, per timeout
PAUSE = 2.0  # seconds; after a longer time without a check, the whole job may have been suspended
WITH_CHILDREN = 10  # times the timeout for ranks that may wait for a child process
HINT = "to change this, set --exit-timeout (0s: never)"
DUMP_END = 1 << 16  # bytes of a stack file
STACKS_TIMEOUT = 2.0  # seconds for hung ranks to write their stacks
_HELD = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "D": "waiting for a device or a file system",
}
_SAME_MOMENT = 0.5  # seconds; heartbeats closer than this do not show which rank was late


@dataclass(frozen=True)
class RankLife:
    """What is known of a rank that still runs, in a form that other nodes understand: ages, not
    times, because the clocks of nodes differ.
    """

    rank: int
    state: int  # of `contract.heartbeat_file`: READY, RUNNING ...
    step: int
    age: float  # seconds since the last heartbeat; of a rank that is READY, without any activity
    host: str = ""
    process: str = ""  # the kernel's state letter of the rank's process, if known
    idle: float = 0.0  # seconds without any activity, if that was measured
    script_ended: bool = False
    has_children: bool = False  # or has had some since it is idle


@dataclass(frozen=True)
class Hang:
    """No rank makes progress. The ranks in `stuck` are the likely cause; the rest wait for them."""

    stuck: list[RankLife]
    seconds: float  # without progress
    step: int
    running: int = 0  # how many ranks train, stuck or waiting
    # if stacks tell: those that are not where the others wait
    absent: tuple[RankLife, ...] = ()
    where: str = ""  # the line at which the first of them is

    @property
    def first(self) -> RankLife:
        """The rank to name."""
        return self.absent[0] if self.absent else self.stuck[0]

    def compare_stacks(self, heartbeats: Iterable[RankLife], stacks: Mapping[int, Stack]) -> Hang:
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


def _describe(heartbeat: RankLife) -> str:
    host = f" on {heartbeat.host}" if heartbeat.host else ""
    reason = f" ({_HELD[heartbeat.process]})" if heartbeat.process in _HELD else ""
    return f"rank {heartbeat.rank}{host} is stuck at step {heartbeat.step}{reason}"


def find_hang(heartbeats: Iterable[RankLife], timeout: float) -> Hang | None:
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


def find_stuck(running: list[RankLife]) -> list[RankLife]:
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


@dataclass
class Standstill:
    """Ranks that make no progress. Without a failure, only their processes did not exit: no work
    is lost.
    """

    failure: Failure | None
    note: str = ""  # on ranks that linger


@dataclass
class Activity:
    """What a rank had used at a check, and since when it has made no progress."""

    usage: process_tree.Usage | None
    heartbeat: float  # time of the last one
    output: int  # bytes that it has printed
    since: float
    has_children: bool  # or has had some since then

    def differs(self, before: Activity, elapsed: float) -> bool:
        """Whether the rank has made progress since `before`."""
        if (self.heartbeat, self.output) != (before.heartbeat, before.output):
            return True
        if self.usage is None or before.usage is None:
            return True
        return self.usage.differs(before.usage, elapsed)


def has_finished(state: int, *, script_ended: bool) -> bool:
    """Whether a rank has completed its script, or has saved and stopped."""
    return script_ended or state == SAVED_AND_STOPPED


class Liveness:
    """One agent's part in it, during one attempt."""

    def __init__(
        self,
        launch: Launch,
        *,
        workers: StartedRanks,
        output: OutputCapture,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
    ) -> None:
        spec = launch.launch_spec
        self._placement, self._attempt = launch.placement, launch.attempt
        self._hang_timeout, self._exit_timeout = spec.hang_timeout, spec.exit_timeout
        self._spawns = spec.style == "spawn"
        self._workers, self._output = workers, output
        self._heartbeats, self._rendezvous = heartbeats, rendezvous
        self._rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        self._rank_exited = False  # on any node
        self._activity: dict[int, Activity] = {}  # by local rank
        self._last_look = self._last_measured = 0.0
        self._reported: dict[int, list[RankLife]] = {}  # by agent; a late report ages no rank
        self._remaining: set[int] = set()  # ranks that still run, on all nodes
        self._since = 0.0  # when the last one of the others was found to have ended

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a message of another agent."""
        if message["kind"] == REPORT:
            self._reported[int(message["from"])] = [RankLife(*row) for row in message["rows"]]
        elif not self._rank_exited:
            self._measure_all(tell=self._placement.is_head)

    def check(
        self, local_ranks: Collection[int], *, ended_agents: Collection[int]
    ) -> Standstill | None:
        """Report these ranks, which have not ended, to the head agent; there, return what hangs or
        lingers, once all stacks are dumped.
        """
        now = time.monotonic()
        if now - self._last_look < min(REPORT_INTERVAL, self._interval) or not self._interval:
            return None
        self._last_look = now
        pids = self._pids(local_ranks)
        if len(pids) < len(self._rank_of) and self._exit_timeout and not self._rank_exited:
            self._measure_all(tell=True)
        if not self._hang_timeout and not self._rank_exited:
            return None
        if now - self._last_measured >= self._interval:
            self._measure(pids, now)
        own = [self._look(local_rank, now) for local_rank in sorted(pids)]
        if not self._placement.is_head:
            self._rendezvous.send({"kind": REPORT, "rows": list(map(astuple, own))}, to=0)
            return None
        self._reported[0] = own
        known = [rank for agent in sorted(self._reported) for rank in self._reported[agent]]
        return self._find_hang(known, local_ranks) or self._find_lingering(
            known, local_ranks, set(range(self._placement.count)) - set(ended_agents), now
        )

    def _measure_all(self, *, tell: bool) -> None:
        """Measure what all ranks do from now on. Members tell the head agent, which tells all
        others.
        """
        self._rank_exited = True
        if tell:
            self._rendezvous.send({"kind": RANK_EXITED})

    @property
    def _interval(self) -> float:
        """The seconds between two measurements of the activity."""
        is_lingering = self._rank_exited or not self._hang_timeout
        return (self._exit_timeout if is_lingering else self._hang_timeout) / CHECKS

    def _measure(self, pids: Mapping[int, int], now: float) -> None:
        """Find out since when these ranks have done nothing. Ranks with step boundaries need it
        only once others have exited.
        """
        elapsed, self._last_measured = now - self._last_measured, now
        if elapsed > max(2 * self._interval, PAUSE):
            self._activity.clear()
        slots = [self._heartbeats.read(local_rank) for local_rank in pids]
        slots = [slot for slot in slots if self._rank_exited or slot.state == READY]
        usage = process_tree.tree_usage(pids[slot.local_rank] for slot in slots) if slots else {}
        for slot in slots:
            used = usage.get(pids[slot.local_rank])
            activity = Activity(
                used,
                slot.time,
                self._output.count_bytes(self._rank_of[slot.local_rank]),
                now,
                used is not None and used.has_children,
            )
            before = self._activity.get(slot.local_rank)
            if before is not None and not activity.differs(before, elapsed):
                activity.since = before.since
                activity.has_children |= before.has_children
            self._activity[slot.local_rank] = activity

    def _look(self, local_rank: int, now: float) -> RankLife:
        slot, activity = self._heartbeats.read(local_rank), self._activity.get(local_rank)
        idle = 0.0 if activity is None else round(now - activity.since, 3)
        silent = round(max(0.0, time.time() - slot.time), 3)
        return RankLife(
            self._rank_of[local_rank],
            slot.state,
            slot.step,
            idle if slot.state == READY else silent,
            self._placement.host,
            process_tree.state(slot.pid) if slot.pid else "",
            idle,
            bool(slot.script_ended),
            activity is not None and activity.has_children,
        )

    def _pids(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Map the ranks that still run to their processes; 0 if not known.

        torchrun, and a script that spawns its ranks, report exits only once all ranks have ended.
        """
        started = self._workers.pids()
        parent = next(iter(started.values()), 0) if self._spawns else 0
        pids = {
            rank: self._heartbeats.read(rank).pid or started.get(rank, parent)
            for rank in local_ranks
        }
        return {rank: pid for rank, pid in pids.items() if not pid or process_tree.is_alive(pid)}

    # -- on the head agent
    # -----------------------------------------------------------------------------

    def _find_hang(self, known: list[RankLife], local_ranks: Collection[int]) -> Standstill | None:
        hang = find_hang(known, self._hang_timeout)
        if hang is None:
            return None
        # before the stacks are dumped: a rank that crashes meanwhile is not the cause
        detected = time.time()
        self.dump_all_stacks(local_ranks)
        stacks = {each.rank: read_dump(self._attempt.stacks(each.rank)) for each in known}
        # those of other nodes may still be on their way
        hang = hang.compare_stacks(known, {rank: each for rank, each in stacks.items() if each})
        message = f"{hang} (--hang-timeout {self._hang_timeout:g}s)"
        return Standstill(
            self._failure(retry_policy.HANG, hang.first, message, detected, step=hang.step)
        )

    def _find_lingering(
        self, known: list[RankLife], local_ranks: Collection[int], agents: set[int], now: float
    ) -> Standstill | None:
        if not self._rank_exited or not known or not agents <= set(self._reported):
            return None
        remaining = {each.rank for each in known}
        if remaining != self._remaining:  # the others may have waited for one that has ended
            self._remaining, self._since = remaining, now
        # those that may wait for a child process, which may do the work
        waiting = {each.rank for each in known if each.has_children} - {
            each.rank for each in known if each.state == SAVED_AND_STOPPED
        }
        limit = self._exit_timeout * (WITH_CHILDREN if waiting else 1)
        if min([now - self._since, *(each.idle for each in known)]) < limit:
            return None
        detected = time.time()
        self.dump_all_stacks(local_ranks)
        note = (
            f"other ranks had exited, so these were killed after {limit:g} s without progress: "
            f"{_names(known)}"
        )
        unfinished = [
            each
            for each in known
            if each.rank in waiting or not has_finished(each.state, script_ended=each.script_ended)
        ]
        if not unfinished:
            return Standstill(None, note)
        first, *rest = unfinished
        others = f", as did {_names(rest)}" if rest else ""
        message = (
            f"it made no progress for {limit:g} s after other ranks had exited{others}; {HINT}"
        )
        return Standstill(self._failure(retry_policy.LINGERED, first, message, detected), note)

    def _failure(
        self, cause: str, first: RankLife, message: str, detected: float, *, step: int | None = None
    ) -> Failure:
        log = str(self._attempt.stacks(first.rank))
        return Failure(
            cause, first.host, first.rank, message=message, step=step, time=detected, log=log
        )

    # -- stacks
    # ----------------------------------------------------------------------------------------

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
            slot.pid: self._attempt.stacks(self._rank_of[slot.local_rank])
            for slot in map(self._heartbeats.read, local_ranks)
            if slot.state >= READY and slot.writes_stacks
        }
        for pid in paths:
            process_tree.send_signal(pid, signal.SIGCONT)  # a stopped process could not write
        request_stacks(paths)


def _names(ranks: Iterable[RankLife]) -> str:
    """Return "rank 1 on a, rank 3 on b", shortened."""
    names = [f"rank {each.rank} on {each.host}" for each in ranks]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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
