"""What a rank measures."""

from __future__ import annotations

import functools
import os
import socket

import pytest
import torch

from paceline.contract.fitness import Measurement
from paceline.runtime.distributed import fitness as measure
from paceline.runtime.distributed.identity import read_identity
from tests.forked_ranks import Ranks


def test_a_product_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PRODUCT_SECONDS", 0.0)
    threads = torch.get_num_threads()
    try:
        assert measure.measure_product(torch.device("cpu")) > 0
    finally:
        torch.set_num_threads(threads)


def links(*, nodes: int = 1) -> Measurement:
    measure.CPU_BYTES = 1 << 16
    if nodes > 1:  # each rank is a node
        names = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
        os.environ.update(names, GROUP_WORLD_SIZE=str(nodes))
    identity = read_identity()
    start = Measurement(identity.rank, socket.gethostname(), identity.node, "cpu")
    return measure.measure_links(start, identity, torch.device("cpu"))


def test_one_node_has_no_links(ranks: Ranks) -> None:
    assert [(each.complete, each.pairs) for each in ranks(links, 2)] == [(True, {})] * 2


def test_links_between_nodes(ranks: Ranks) -> None:
    found = ranks(functools.partial(links, nodes=3), 3)
    assert [sorted(each.pairs) for each in found] == [["1"], ["0", "2"], ["1"]]
    assert all(each.complete for each in found)
    assert all(speed > 0 for each in found for speed in each.pairs.values())
