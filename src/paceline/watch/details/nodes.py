"""The nodes and ranks of a run, as their agents saw them last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.contract.heartbeat_file import ABSENT, FINISHED, READY, RUNNING, SAVED_AND_STOPPED
from paceline.watch.node_usage import NodeUsage
from paceline.watch.rank_samples import newest_samples, read_ranks, slow_ranks

MAX_SAMPLES = 200  # of a node, evenly spaced
STATES = {
    ABSENT: "starting", READY: "starting", RUNNING: "running", SAVED_AND_STOPPED: "stopped", FINISHED: "finished"
}  # fmt: skip


@dataclass(frozen=True)
class RankDetails:
    """A rank, as its agent saw it last."""

    rank: int
    host: str
    state: str  # starting, running, stopped or finished
    step: int
    seconds_per_step: float
    waited: float  # seconds, for data, since its first step
    age: float | None  # seconds since its last heartbeat, at the time of the sample
    is_slow: bool


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
                rank, last.host, STATES.get(last.state, "running"), last.step, last.seconds_per_step, last.waited,
                last.age, is_slow=rank in slow,
            )
        )  # fmt: skip
    return found


def _node(usage: NodeUsage) -> NodeDetails:
    gpus = usage.details.get("gpus")
    cores, memory = usage.details.get("cores"), usage.details.get("memory_total")
    return NodeDetails(
        usage.node, usage.host, cores if isinstance(cores, int) else None, memory if isinstance(memory, int) else None,
        [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else [], _thin(usage.samples),
    )  # fmt: skip


def _thin(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most so many samples, the last one among them. Those of ranks are in `ranks`."""
    every = max(1, -(-len(samples) // MAX_SAMPLES))
    kept = [*samples[::-1]][::every][::-1]
    return [{name: value for name, value in sample.items() if name != "ranks"} for sample in kept]
