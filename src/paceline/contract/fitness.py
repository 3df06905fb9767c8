"""How fit a node is: what a rank measures in a few seconds, and which node that shows to be slow.

A node is compared with the others, never with a data sheet: only the comparison says that a node is
the odd one out. What a link type should give is a hint, with a wide margin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

# begins the line that a rank prints instead, if the variable `env.FITNESS` is not set
LINE = "paceline-fitness "


@dataclass(frozen=True)
class Measurement:
    """One rank's numbers; 0 where it has none. Speeds of links are in GB/s, of all-reduces as bus
    bandwidth.
    """

    rank: int
    host: str
    node: int
    device: str  # "cpu", or the GPU's name
    tflops: float = 0.0  # of a matrix product; on a CPU per second of its own CPU time
    within: float = 0.0  # all-reduce among the ranks of the node
    between: float = 0.0  # all-reduce among the first ranks of all nodes
    # exchange with the first rank of another node, by its number
    pairs: dict[str, float] = field(default_factory=dict)
    interface: str = ""  # over which nodes are connected
    interface_speed: float = 0.0  # GB/s, as its driver reports it
    fabric: str = ""  # such as "400 Gb/sec (4X NDR)"
    fabric_speed: float = 0.0  # GB/s of all InfiniBand ports
    backend: str = ""
    complete: bool = False  # all of it was measured
    error: str = ""  # why the rest was not


SLOW_CPU = 0.6  # of the typical speed of a core, by its own CPU time: frequencies vary
SLOW_GPU = 0.75  # of the typical speed of a GPU
SLOW_PAIR = 0.4  # of the typical exchange between two nodes
SLOW_LINK = 0.25  # of what a link type should give
TCP = 0.7  # of a link's speed that one all-reduce over TCP gets
GLOO_LIMIT = 2.5  # GB/s that gloo gets over any link
# Bus bandwidth of an all-reduce within a node, in GB/s, by a word of the GPU's name.
WITHIN = {
    "B200": 700,
    "H200": 370,
    "H100": 370,
    "A100": 220,
    "V100": 120,
    "A40": 20,
    "L40": 20,
    "L4": 10,
    "T4": 6,
}


@dataclass(frozen=True)
class Judgement:
    """A node, or a link, that is slower than it should be. If it is unfit, a run should go on
    without the node.
    """

    host: str
    text: str
    unfit: bool
    evidence: tuple[str, ...] = ()


def judge(measured: Sequence[Measurement]) -> list[Judgement]:
    """Return what is slow, the worst first."""
    found = [*_failed_devices(measured), *_slow_devices(measured), *_slow_nodes(measured)]
    blamed = {each.host for each in found}
    return found + [each for each in _slow_links(measured) if each.host not in blamed]


def _failed_devices(measured: Sequence[Measurement]) -> list[Judgement]:
    """Return nodes with a device that computes nothing, or nonsense, while those of other nodes
    work.
    """
    working = {each.host for each in measured if each.tflops > 0}
    found: dict[str, Judgement] = {}
    for each in measured:
        has_failed = bool(each.error) or each.tflops != 0  # otherwise it has not measured in time
        if not each.tflops > 0 and has_failed and working - {each.host}:
            what = "core" if each.device == "cpu" else each.device
            facts = (f"rank {each.rank} on {each.host}: {each.error or f'{each.tflops} TFLOP/s'}",)
            found.setdefault(
                each.host, Judgement(each.host, f"its {what} fails", unfit=True, evidence=facts)
            )
    return list(found.values())


def _slow_devices(measured: Sequence[Measurement]) -> list[Judgement]:
    found: dict[str, Judgement] = {}
    for each in measured:
        alike = [
            other.tflops for other in measured if other.device == each.device and other.tflops > 0
        ]
        if (
            not each.tflops > 0
            or len({other.host for other in measured if other.device == each.device}) < 2
        ):
            continue
        typical = sorted(alike)[len(alike) // 2]  # the upper median: of two, the faster one
        share = each.tflops / typical
        if share < (SLOW_CPU if each.device == "cpu" else SLOW_GPU):
            what = "core" if each.device == "cpu" else each.device
            text = f"its {what} computes at {share:.0%} of the speed of the others"
            facts = (
                f"rank {each.rank} on {each.host}: {_speed(each.tflops)}",
                f"typically {_speed(typical)}",
            )
            found.setdefault(each.host, Judgement(each.host, text, unfit=True, evidence=facts))
    return list(found.values())


def _slow_nodes(measured: Sequence[Measurement]) -> list[Judgement]:
    """Return nodes whose exchanges are all slow, while those between other nodes are not."""
    hosts = {each.node: each.host for each in measured}
    pairs = {
        (each.node, int(peer)): speed for each in measured for peer, speed in each.pairs.items()
    }
    found = []
    for node, host in sorted(hosts.items()):
        own = [speed for pair, speed in pairs.items() if node in pair]
        others = [speed for pair, speed in pairs.items() if node not in pair]
        if own and others and max(own) < SLOW_PAIR * median(others):
            text = (
                f"its network reaches {max(own) / median(others):.0%} of the bandwidth of the "
                "others"
            )
            facts = (
                f"{host}: at most {max(own):.2f} GB/s with {len(own)} neighbours",
                f"other nodes: {median(others):.2f} GB/s",
            )
            found.append(Judgement(host, text, unfit=True, evidence=facts))
    return found


def _slow_links(measured: Sequence[Measurement]) -> list[Judgement]:
    """Compare all-reduces with what the type of link should give."""
    found: dict[str, Judgement] = {}
    for each in measured:
        within, between = expected_within(each), expected_between(each)
        if within and 0 < each.within < SLOW_LINK * within:
            facts = (
                f"{each.within:.1f} GB/s within {each.host}",
                f"{each.device} should give about {within:.0f}",
            )
            text = (
                "all-reduce among its GPUs is slow: check NVLink and peer access (nvidia-smi "
                "topo -m)"
            )
            found.setdefault(each.host, Judgement(each.host, text, unfit=False, evidence=facts))
        if between and 0 < each.between < SLOW_LINK * between:
            link = each.fabric or each.interface
            facts = (
                f"{each.between:.2f} GB/s between nodes",
                f"{link} should give about {between:.1f}",
            )
            text = f"all-reduce between the nodes over {link} is slow"
            found.setdefault("", Judgement(each.host, text, unfit=False, evidence=facts))
    return list(found.values())


def expected_within(measurement: Measurement) -> float:
    """Return what an all-reduce within a node should give; 0 if nobody knows."""
    if measurement.backend != "nccl":
        return 0.0
    name = measurement.device
    if re.search(r"PCIe?\b", name, re.IGNORECASE):
        return 15.0
    return float(next((speed for word, speed in WITHIN.items() if word in name), 0.0))


def expected_between(measurement: Measurement) -> float:
    """Return what an all-reduce between nodes should give over this link; 0 if nobody knows."""
    if measurement.backend == "nccl" and measurement.fabric_speed:
        return measurement.fabric_speed * 0.8
    return min(GLOO_LIMIT, measurement.interface_speed * TCP)


def _speed(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
