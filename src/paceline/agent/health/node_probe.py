"""Look at the ranks of a live run on this node: where they are, and their stacks if they make no
progress.

`paceline doctor` runs this next to the ranks, in a step of the job or on this machine. It prints
one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.agent.health import preflight
from paceline.agent.health.heartbeat import Heartbeat, read_file
from paceline.agent.health.liveness import read_dump, request_stacks
from paceline.agent.health.node_metrics import rank_row
from paceline.agent.workers import process_tree
from paceline.contract.foreign_records import read_objects
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.contract.stacks import PROBE_MARK, STACKS

SLOW_START = 10.0  # seconds before the first step after which stacks are of interest
NO_STEP = 15.0  # seconds without a step, at least
STEPS = 10  # steps' worth of time without one
QUIET = 10.0  # seconds without output after which ranks may be stuck
SECONDS = 5.0  # between the two dumps
AWAKE = 2  # times that the main thread of a rank that only waits may go back to sleep meanwhile


class Rank(NamedTuple):
    """A rank of this node."""

    number: int
    heartbeat: Heartbeat

    @property
    def is_stuck(self) -> bool:
        """Whether it has made no progress for a while; it may also wait for a rank of another
        node.
        """
        age = time.time() - self.heartbeat.time
        if self.heartbeat.state == READY:
            return age > SLOW_START
        return self.heartbeat.state == RUNNING and age > max(
            NO_STEP, STEPS * self.heartbeat.seconds_per_step
        )


def main() -> None:
    """Print what `look` finds in the run folder that `argv` has; without one, what this node
    has.
    """
    found = (
        look(RunFolder(Path(sys.argv[1])), stacks=STACKS in sys.argv[2:])
        if sys.argv[1:]
        else {"host": _host(), **preflight.node_facts()}
    )
    print(PROBE_MARK + json.dumps(found), flush=True)


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(run: RunFolder, *, stacks: bool = False) -> dict[str, Any]:
    """Return the rows of this node's ranks. With `stacks`, or if one of them is stuck, dump their
    stacks.

    A rank is not stuck as long as ranks print something.
    """
    host, attempts = _host(), run.attempts()
    ranks = list(_ranks(run, host))
    rows = [rank_row(rank.number, rank.heartbeat) for rank in ranks]
    found: dict[str, Any] = {"time": time.time(), "host": host, "ranks": rows}
    if not attempts or not ranks:
        return found
    printed = attempts[-1].last_output()
    is_quiet = printed is None or time.time() - printed > QUIET
    if is_quiet and any(rank.is_stuck for rank in ranks):
        found |= compare_dumps(attempts[-1], ranks)
    elif stacks:
        found["dumped"] = dump_stacks(attempts[-1], ranks)
    found["foreign"] = [
        rank.number
        for rank in ranks
        if rank.heartbeat.state >= READY and not rank.heartbeat.writes_stacks
    ]
    return found


def _ranks(run: RunFolder, host: str) -> Iterator[Rank]:
    for path in sorted(run.events.glob("agent-*.jsonl")):
        events = [event for event in read_objects(path) if event.get("event") == "started"]
        event = events[-1] if events else {}
        if event.get("host") != host or not isinstance(event.get("heartbeat"), str):
            continue
        for number, local_rank in zip(
            event.get("ranks") or [], event.get("local_ranks") or [], strict=False
        ):
            try:
                yield Rank(number, read_file(Path(event["heartbeat"]), local_rank))
            except (OSError, ValueError):
                continue


def compare_dumps(attempt: AttemptFolder, ranks: Sequence[Rank]) -> dict[str, list[int]]:
    """Take two stack dumps, and return which ranks have written their stacks and which do anything.

    `changed`: their stacks differ. `busy`: they use CPU time, files or connections. `awake`: their
    main thread has slept and gone on several times, as one that trains does at each step.
    """
    dump_stacks(attempt, ranks)
    before = {rank.number: read_dump(attempt.stacks(rank.number)) for rank in ranks}
    pids = {rank.number: rank.heartbeat.pid for rank in ranks if rank.heartbeat.pid}
    used, slept = (
        process_tree.tree_usage(pids.values()),
        {pid: _sleeps(pid) for pid in pids.values()},
    )
    time.sleep(SECONDS)
    later = process_tree.tree_usage(pids.values())
    awake = {pid: _sleeps(pid) - slept[pid] for pid in pids.values()}
    dumped = dump_stacks(attempt, ranks)

    def is_busy(pid: int) -> bool:
        has_ended = pid not in used or pid not in later
        return has_ended or later[pid].differs(used[pid], SECONDS)

    return {
        "dumped": dumped,
        "changed": [
            number for number in dumped if read_dump(attempt.stacks(number)) != before[number]
        ],
        "busy": [number for number, pid in pids.items() if is_busy(pid)],
        "awake": [number for number, pid in pids.items() if awake[pid] > AWAKE],
    }


def dump_stacks(attempt: AttemptFolder, ranks: Sequence[Rank]) -> list[int]:
    """Ask the ranks for their Python stacks, and return those that have written them.

    A script may take the signal for itself. It is not ours to send then: the script may save and
    exit.
    """
    number_of = {
        rank.heartbeat.pid: rank.number
        for rank in ranks
        if rank.heartbeat.state >= READY and rank.heartbeat.writes_stacks
    }
    paths = {pid: attempt.stacks(number) for pid, number in number_of.items()}
    return [number_of[pid] for pid in request_stacks(paths)]


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
