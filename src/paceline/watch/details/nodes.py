"""The nodes and ranks of a run, as their agents saw them last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.contract.heartbeat_file import ABSENT, FINISHED, READY, RUNNING, SAVED_AND_STOPPED
from paceline.contract.verdict import DONE, DONE_UNSAVED, STOPPED
from paceline.watch.goodput import Goodput
from paceline.watch.node_usage import NodeUsage
from paceline.watch.overview import Overview
from paceline.watch.rank_samples import newest_samples, read_ranks, slow_ranks

MAX_SAMPLES = 200  # of a node, evenly spaced
STARTING = "starting"
STATES = {
    ABSENT: STARTING,
    READY: STARTING,
    RUNNING: "running",
    SAVED_AND_STOPPED: "stopped",
    FINISHED: "finished",
}
ENDED = {DONE: "finished", DONE_UNSAVED: "finished", STOPPED: "stopped"}  # by the status of the run


@dataclass(frozen=True)
class RankDetails:
    """A rank, as its agent saw it last."""

    rank: int
    host: str
    state: str  # starting, running, stopped, finished, or ended with a run that was not done
    step: int
    seconds_per_step: float
    waited: float  # seconds, for data, since its first step
    age: float | None  # seconds since its last heartbeat, at the time of the sample
    is_slow: bool
    seen: float | None = None  # when its agent took the sample


@dataclass(frozen=True)
class NodeDetails:
    """A node of the run: what it has, and its newest samples (time, cpu, memory, gpus, ...)."""

    node: int
    host: str
    cores: int | None
    memory: int | None  # bytes
    gpus: list[dict[str, Any]]  # name, memory
    samples: list[dict[str, Any]]


def make_nodes(usage: Sequence[NodeUsage]) -> list[NodeDetails]:
    return [_node(each) for each in usage]


def make_ranks(usage: Sequence[NodeUsage]) -> list[RankDetails]:
    """Return the ranks of the newest job start."""
    samples = read_ranks(newest_samples(each) for each in usage)
    slow = slow_ranks(samples)
    found = []
    for rank, known in samples.items():
        last = known[-1]
        found.append(
            RankDetails(
                rank,
                last.host,
                STATES.get(last.state, "running"),
                last.step,
                last.seconds_per_step,
                last.waited,
                last.age,
                is_slow=rank in slow,
                seen=last.time,
            )
        )
    return found


def settle_ranks(
    ranks: Sequence[RankDetails], run: Overview, goodput: Goodput
) -> list[RankDetails]:
    """Return the ranks as they are now: agents take samples at intervals, and none after the end of
    a run.

    A script without the runtime has no heartbeats, so nobody sees that its ranks have started.
    """
    if run.is_over:
        return [_ended(rank, run) for rank in ranks]
    runs = bool(goodput.timeline) and goodput.timeline[-1].kind == "running"
    return [
        replace(rank, state="running") if runs and rank.state == STARTING else rank
        for rank in ranks
    ]


def _ended(rank: RankDetails, run: Overview) -> RankDetails:
    """Return a rank at the end of its run. One that failed may have lagged behind, as the last
    sample saw it.
    """
    state = ENDED.get(run.status, "ended")
    is_behind = state != "ended" or rank.state == STARTING
    return replace(
        rank, state=state, step=max(rank.step, run.step or 0) if is_behind else rank.step
    )


def _node(usage: NodeUsage) -> NodeDetails:
    gpus = usage.details.get("gpus")
    cores, memory = usage.details.get("cores"), usage.details.get("memory_total")
    return NodeDetails(
        usage.node,
        usage.host,
        cores if isinstance(cores, int) else None,
        memory if isinstance(memory, int) else None,
        [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else [],
        _thin(usage.samples),
    )


def _thin(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most so many samples, the last one among them. Those of ranks are in `ranks`."""
    every = max(1, -(-len(samples) // MAX_SAMPLES))
    kept = [*samples[::-1]][::every][::-1]
    return [{name: value for name, value in sample.items() if name != "ranks"} for sample in kept]
