"""Evaluation counts every sample once on any number of ranks, with the same number of forwards on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from paceline.errors import UsageError
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.map_loader import MapLoader
from paceline.runtime.data.transfer import map_tensors, to_device, trim
from paceline.runtime.distributed.identity import Identity, read_identity
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Counting, Noisy


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )


def count_on_a_rank(samples: int, batch_size: int) -> tuple[int, int, float, int]:
    """Evaluate as users write it, with a model whose forward synchronizes its buffers across ranks."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 10)
    model = DistributedDataParallel(net()).eval()
    hits, seen, loss, forwards = 0, 0, 0.0, 0
    with torch.no_grad():
        for x, y in make_evaluation_loader(data, batch_size=batch_size, identity=read_identity()):
            out = model(x)
            hits += int((out.argmax(1) == y).sum())
            seen += len(y)
            loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            forwards += 1
    dist.destroy_process_group()
    return hits, seen, loss, forwards


@pytest.mark.parametrize("samples", [25, 23])  # with 4 ranks: a last batch of 1 leaves three with nothing
def test_counts_agree_at_every_world_size(ranks: Ranks, samples: int) -> None:
    alone = ranks(count_on_a_rank, 1, samples, 8)[0]
    assert alone[1] == samples
    for world_size in (2, 4):
        parts = ranks(count_on_a_rank, world_size, samples, 8)
        assert sum(part[0] for part in parts) == alone[0]
        assert sum(part[1] for part in parts) == samples
        assert sum(part[2] for part in parts) == pytest.approx(alone[2], rel=1e-5)
        assert {part[3] for part in parts} == {alone[3]}


def test_a_loader_is_accepted_instead_of_its_data_set() -> None:
    data = Noisy(21)
    ours = MapLoader(data, batch_size=4, identity=Identity())
    plain = DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda items: [len(items)])
    assert sum(len(y) for _, y in make_evaluation_loader(ours, identity=Identity())) == 21
    assert [batch[0] for batch in make_evaluation_loader(plain, identity=Identity())] == [4, 4, 4, 4, 4, 1]
    with pytest.raises(UsageError, match="SubsetRandomSampler"):
        make_evaluation_loader(DataLoader(data, sampler=SubsetRandomSampler([1, 2])))


def test_streams_and_repeated_passes() -> None:
    stream = make_evaluation_loader(Counting(21), batch_size=4, identity=Identity())
    assert [sorted(torch.cat(list(stream)).tolist()) for _ in range(2)] == [list(range(21))] * 2
    noisy = make_evaluation_loader(Noisy(9), batch_size=4, identity=Identity(), num_workers=1)
    first, second = [torch.cat([x for x, _ in noisy]) for _ in range(2)]
    noisy.close()
    assert first.equal(second), "every evaluation has the same randomness"


def test_nested_batches_are_trimmed_and_moved_whole() -> None:
    batch: dict[str, Any] = {"x": torch.ones(3, 2), "more": [torch.ones(3), ("a", torch.ones(()))], "names": ["a", "b"]}
    empty = trim(batch, 0)
    assert empty["x"].shape == (0, 2)
    assert empty["more"][0].shape == (0,)
    assert empty["more"][1][0] == "a"
    assert empty["names"] == []
    moved = to_device(batch, torch.device("meta"))
    devices: list[str] = []
    map_tensors(moved, lambda each: devices.append(each.device.type))
    assert devices == ["meta"] * 3
