"""How fit a node is: what a rank measures in a few seconds, and which node that shows to be slow.

A node is compared with the others, never with a data sheet: only the comparison says that a node is
the odd one out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

# begins the line that a rank prints instead, if the variable `env.FITNESS` is not set
LINE = "paceline-fitness "


@dataclass(frozen=True)
class Measurement:
    """One rank's numbers; 0 where it has none."""

    rank: int
    host: str
    node: int
    device: str  # "cpu", or the GPU's name
    tflops: float = 0.0  # of a matrix product; on a CPU per second of its own CPU time
    # GB/s of an exchange between the first rank of this node and of another, by its number
    pairs: dict[str, float] = field(default_factory=dict)
    complete: bool = False  # all of it was measured
    error: str = ""  # why the rest was not


SLOW_CPU = 0.6  # of the typical speed of a core, by its own CPU time: frequencies vary
SLOW_GPU = 0.75  # of the typical speed of a GPU
SLOW_PAIR = 0.4  # of the typical exchange between two nodes


@dataclass(frozen=True)
class Judgement:
    """A node that is slower than it should be, or not measured. If it is unfit, a run should go on
    without it.
    """

    host: str
    text: str
    unfit: bool
    evidence: tuple[str, ...] = ()


def judge(measured: Sequence[Measurement]) -> list[Judgement]:
    """Return what is slow, the worst first: one judgement for each node."""
    found: dict[str, Judgement] = {}
    for each in (*_slow_devices(measured), *_slow_nodes(measured)):
        found.setdefault(each.host, each)
    return list(found.values())


def _slow_devices(measured: Sequence[Measurement]) -> Iterator[Judgement]:
    """Compare devices of the same kind. One that computes nothing, or nonsense, while those of
    other nodes work, has failed.
    """
    for each in measured:
        others = [other for other in measured if other.host != each.host and other.tflops > 0]
        alike = [other.tflops for other in measured if other.device == each.device]
        what, limit = ("core", SLOW_CPU) if each.device == "cpu" else (each.device, SLOW_GPU)
        if each.tflops > 0:
            speeds = sorted(speed for speed in alike if speed > 0)
            typical = speeds[len(speeds) // 2]  # the upper median: of two, the faster one
            share = each.tflops / typical
            text = f"its {what} computes at {share:.0%} of the speed of the others"
            fact = f"rank {each.rank} on {each.host}: {_speed(each.tflops)}"
            if share < limit and any(other.device == each.device for other in others):
                yield Judgement(each.host, text, True, (fact, f"typically {_speed(typical)}"))
        elif others and (each.error or each.tflops != 0):  # otherwise it was not measured in time
            fact = f"rank {each.rank} on {each.host}: {each.error or f'{each.tflops} TFLOP/s'}"
            yield Judgement(each.host, f"its {what} fails", True, (fact,))


def _slow_nodes(measured: Sequence[Measurement]) -> Iterator[Judgement]:
    """Find nodes whose exchanges are all slow, while those between other nodes are not."""
    hosts = {each.node: each.host for each in measured}
    pairs = {
        (each.node, int(peer)): speed for each in measured for peer, speed in each.pairs.items()
    }
    for node, host in sorted(hosts.items()):
        own = max((speed for pair, speed in pairs.items() if node in pair), default=None)
        others = [speed for pair, speed in pairs.items() if node not in pair]
        if own is not None and others and own < SLOW_PAIR * median(others):
            text = f"its network reaches {own / median(others):.0%} of the bandwidth of the others"
            facts = (f"{host}: at most {own:.2f} GB/s", f"other nodes: {median(others):.2f} GB/s")
            yield Judgement(host, text, True, facts)


def _speed(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
