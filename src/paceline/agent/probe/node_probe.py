"""Look at the ranks of a live run on this node: where they are, and their stacks if they make no progress.

`paceline doctor` runs this next to the ranks, in a step of the job or on this machine. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.agent.health import preflight
from paceline.agent.health.heartbeat import Heartbeat, read_file
from paceline.agent.health.sampler import rank_row
from paceline.agent.rendezvous import network
from paceline.agent.workers import processes
from paceline.contract.files.foreign_records import read_objects
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.run_folder import RunFolder

STACKS = "--stacks"
MARK = "paceline-probe "  # begins the line with the answer: a site's start-up files may print others
SLOW_START = 10.0  # seconds before the first step after which stacks are of interest
NO_STEP = 15.0  # seconds without a step, at least
STEPS = 10  # steps' worth of time without one
STACKS_TIMEOUT = 2.0  # seconds for the ranks to write their stacks


class Rank(NamedTuple):
    """A rank of this node."""

    number: int
    beat: Heartbeat
    times: tuple[float, float]

    @property
    def is_stuck(self) -> bool:
        """Whether it has made no progress for a while; it may also wait for a rank of another node."""
        age = time.time() - self.beat.time
        if self.beat.state == READY:
            return age > SLOW_START
        return self.beat.state == RUNNING and age > max(NO_STEP, STEPS * self.beat.seconds_per_step)


def main() -> None:
    """Print what `look` finds in the run folder that `argv` has; without one, what this node has."""
    found = look(RunFolder(Path(sys.argv[1])), stacks=STACKS in sys.argv[2:]) if sys.argv[1:] else node_facts()
    print(MARK + json.dumps(found), flush=True)


def node_facts() -> dict[str, Any]:
    """Return what nodes of an allocation are compared by."""
    return {
        "host": _host(), "interfaces": network.interfaces(), "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(), "torch": preflight.torch_version(), "nccl": preflight.nccl_version(),
        "paceline": __version__, "gpu_driver": preflight.gpu_driver(),
    }  # fmt: skip


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(run: RunFolder, *, stacks: bool = False) -> dict[str, Any]:
    """Return the rows of this node's ranks, and dump their stacks if one of them is stuck, or with `stacks`."""
    host = _host()
    ranks = list(_ranks(run, host))
    if stacks or any(rank.is_stuck for rank in ranks):
        _dump_stacks(run, [rank for rank in ranks if rank.beat.state >= READY])
    rows = [rank_row(*rank) for rank in ranks]
    return {"time": time.time(), "host": host, "ranks": rows}


def _ranks(run: RunFolder, host: str) -> Iterator[Rank]:
    for path in sorted(run.events.glob("agent-*.jsonl")):
        events = [event for event in read_objects(path) if event.get("event") == "started"]
        event = events[-1] if events else {}
        if event.get("host") != host or not isinstance(event.get("heartbeat"), str):
            continue
        for number, local_rank in zip(event.get("ranks") or [], event.get("local_ranks") or [], strict=False):
            try:
                yield Rank(number, *read_file(Path(event["heartbeat"]), local_rank))
            except (OSError, ValueError):
                continue


def _dump_stacks(run: RunFolder, ranks: list[Rank]) -> None:
    """Ask the ranks for their Python stacks, and wait until the files have grown."""
    attempts = run.attempts()
    if not attempts:
        return
    sizes = {attempts[-1].stacks(rank.number): _size(attempts[-1].stacks(rank.number)) for rank in ranks}
    for rank in ranks:
        if processes.has_handler(rank.beat.pid, signal.SIGUSR2):  # otherwise the signal would end it
            processes.send_signal(rank.beat.pid, signal.SIGUSR2)
    deadline = time.monotonic() + STACKS_TIMEOUT
    while time.monotonic() < deadline and not all(_size(path) > size for path, size in sizes.items()):
        time.sleep(0.05)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
