"""Hangs: which ranks the others wait for, from what is known of all ranks, and their stacks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.agent.workers import process_tree
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.stacks import Stack, read_stack

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
