"""Find out whether ranks that make no steps do anything: take two stack dumps, and measure what
they use in between.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.agent.health.activity import BUSY_CPU, BUSY_IO
from paceline.agent.health.process_usage import tree_usage
from paceline.agent.workers import process_tree
from paceline.contract.heartbeat_file import READY
from paceline.contract.run_folder import AttemptFolder
from paceline.contract.stacks import Stack, read_stack

if TYPE_CHECKING:
    from paceline.agent.probe.node_probe import Rank

SECONDS = 5.0  # between the two dumps
AWAKE = 2  # times that the main thread of a rank that only waits may go back to sleep meanwhile
STACKS_TIMEOUT = 2.0  # seconds for the ranks to write their stacks
DUMP_END = 1 << 16  # bytes of a stack file; the newest dump is at its end


def watch(attempt: AttemptFolder, ranks: Sequence[Rank]) -> dict[str, list[int]]:
    """Return which ranks have written their stacks, and which of them move.

    `changed`: their stacks differ. `busy`: they use CPU time, files or connections. `awake`: their
    main thread has slept and gone on several times, as one that trains does at each step.
    """
    dump_stacks(attempt, ranks)
    before = {rank.number: _read(attempt.stacks(rank.number)) for rank in ranks}
    pids = {rank.number: rank.heartbeat.pid for rank in ranks if rank.heartbeat.pid}
    used, slept = tree_usage(pids.values()), {pid: _sleeps(pid) for pid in pids.values()}
    time.sleep(SECONDS)
    later, awake = (
        tree_usage(pids.values()),
        {pid: _sleeps(pid) - slept[pid] for pid in pids.values()},
    )
    dumped = dump_stacks(attempt, ranks)

    def is_busy(pid: int) -> bool:
        if pid not in used or pid not in later:
            return True  # it has just ended
        cpu, io = abs(later[pid].cpu - used[pid].cpu), abs(later[pid].io - used[pid].io)
        return cpu >= BUSY_CPU * SECONDS or io >= BUSY_IO * SECONDS

    return {
        "dumped": dumped,
        "changed": [number for number in dumped if _read(attempt.stacks(number)) != before[number]],
        "busy": [number for number, pid in pids.items() if is_busy(pid)],
        "awake": [number for number, pid in pids.items() if awake[pid] > AWAKE],
    }


def dump_stacks(attempt: AttemptFolder, ranks: Sequence[Rank]) -> list[int]:
    """Ask the ranks for their Python stacks, and return those that have written them.

    A script may take the signal for itself. It is not ours to send then: the script may save and
    exit.
    """
    sizes = {}
    for rank in ranks:
        ready = rank.heartbeat.state >= READY and rank.writes_stacks
        # otherwise the signal would end it
        if ready and process_tree.has_handler(rank.heartbeat.pid, signal.SIGUSR2):
            sizes[rank.number] = _size(attempt.stacks(rank.number))
            process_tree.send_signal(rank.heartbeat.pid, signal.SIGUSR2)
    deadline = time.monotonic() + STACKS_TIMEOUT
    now = sizes
    while True:
        before, now = now, {number: _size(attempt.stacks(number)) for number in sizes}
        dumped = [number for number, size in sizes.items() if now[number] > size]
        # A dump is written in many pieces: it is complete once the file grows no more.
        if (len(dumped) == len(sizes) and now == before) or time.monotonic() > deadline:
            return dumped
        time.sleep(0.05)


def _sleeps(pid: int) -> int:
    """Return how often the main thread of a process has gone to sleep by itself."""
    with suppress(OSError, ValueError, IndexError):
        for line in (
            Path(f"/proc/{pid}/task/{pid}/status")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        ):
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0


def _read(path: Path) -> Stack | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, _size(path) - DUMP_END))
            return read_stack(file.read().decode(errors="replace"))
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
