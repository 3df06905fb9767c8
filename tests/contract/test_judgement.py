"""Which node is called slow: the odd one out, and nobody if all are alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.contract.fitness import Measurement, judge


def nodes(
    count: int = 4, *, device: str = "cpu", tflops: float = 0.03, pair: float = 1.0
) -> list[Measurement]:
    """Return measurements of healthy nodes with one rank each, where neighbours exchange data."""
    neighbours: dict[int, dict[str, float]] = {node: {} for node in range(count)}
    for one, other in pairwise(range(count)):
        neighbours[one][str(other)] = neighbours[other][str(one)] = pair
    return [
        Measurement(
            node,
            f"node{node}",
            node,
            device,
            tflops=tflops * (1 + node / 100),
            pairs=pairs,
            complete=True,
        )
        for node, pairs in neighbours.items()
    ]


def test_alike() -> None:
    assert judge(nodes()) == []
    assert judge(nodes(1)) == []
    assert judge([]) == []


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slow_core(count: int) -> None:
    measured = nodes(count)
    measured[1] = replace(measured[1], tflops=0.01)
    (slow,) = judge(measured)
    assert (slow.host, slow.unfit) == ("node1", True)
    assert slow.text.startswith("its core computes at 3")
    assert slow.evidence[0] == "rank 1 on node1: 10.0 GFLOP/s"


def test_a_slow_gpu_among_other_models() -> None:
    """A node with other GPUs is compared with its own kind."""
    measured = [
        *nodes(3, device="H200", tflops=700),
        replace(nodes(1, device="T4", tflops=60)[0], host="node9", node=9),
    ]
    assert judge(measured) == []
    measured[0] = replace(measured[0], tflops=500)
    (slow,) = judge(measured)
    assert (slow.host, slow.text) == (
        "node0",
        "its H200 computes at 71% of the speed of the others",
    )


def test_a_slow_network_of_one_node() -> None:
    measured = nodes(5)
    measured[2] = replace(measured[2], pairs={"1": 0.1, "3": 0.12})
    measured[1] = replace(measured[1], pairs={"0": 1.0, "2": 0.1})
    measured[3] = replace(measured[3], pairs={"2": 0.12, "4": 1.0})
    (slow,) = judge(measured)
    assert (slow.host, slow.unfit) == ("node2", True)
    assert "its network reaches 12%" in slow.text


def test_one_slow_link_is_nobodys_fault() -> None:
    measured = nodes(2, pair=0.01)
    assert judge(measured) == [], "which of the two ends is slow?"


@pytest.mark.parametrize(
    ("tflops", "error"), [(0.0, "CUDA error: uncorrectable ECC error"), (float("nan"), "")]
)
def test_a_device_that_fails(tflops: float, error: str) -> None:
    """The others wait for it in vain: their links are not to blame."""
    measured = [
        replace(each, pairs={}, complete=False) for each in nodes(3, device="H200", tflops=700)
    ]
    measured[1] = replace(measured[1], tflops=tflops, error=error)
    (failed,) = judge(measured)
    assert (failed.host, failed.unfit, failed.text) == ("node1", True, "its H200 fails")
    assert (error or "nan") in failed.evidence[0]


def test_a_node_that_is_late_has_not_failed() -> None:
    measured = nodes(3)
    measured[1] = replace(measured[1], tflops=0.0, complete=False)
    assert judge(measured) == []
