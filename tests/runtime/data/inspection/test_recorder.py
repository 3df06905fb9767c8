"""What the ranks record of their loaders, on real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import paceline
from paceline.cluster.checks.findings import GOOD, PROBLEM, WARNING
from paceline.inspection.sample_checks import check_samples
from paceline.inspection.samples import Samples, read_samples
from paceline.runtime import loop
from paceline.runtime.data.inspection.loader_walk import LoaderWalk
from paceline.runtime.data.inspection.plain_loaders import PlainLoaders
from paceline.runtime.data.inspection.recorder import Recorder, digest
from tests.forked_ranks import Ranks


class Ended(Exception):
    """The process would have ended here."""


class KeptRecorder(Recorder):
    def end_process(self) -> NoReturn:
        raise Ended


class Unreadable(Dataset[Any]):
    """Its items cost too much to be read only to know which ones they are."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the items are not needed")


class Numbers(IterableDataset[Any]):
    """A stream of numbers, in another order in each epoch; with `by_rank`, another one on each rank."""

    def __init__(self, by_rank: bool = False) -> None:
        self.by_rank, self.epoch = by_rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        first = 100 * dist.get_rank() if self.by_rank else 0
        yield from (torch.tensor(first + (each + self.epoch) % 17) for each in range(17))


def record_loader(folder: str, make: Callable[[Any], Any]) -> None:
    loop.inspector = LoaderWalk(KeptRecorder(Path(folder), epochs=2, limit=None))
    with contextlib.suppress(Ended), paceline.session(seed=3) as run:
        for _ in run.steps(make(run)):
            break
        raise AssertionError("the loop did not end the process")


def map_style(run: Any) -> Any:
    return run.loader(Unreadable(), batch_size=4, accumulate=2, num_workers=1)


def tensors(run: Any) -> Any:
    return run.loader(TensorDataset(torch.arange(10.0)), batch_size=4, drop_last=False, shuffle=False)


def stream(run: Any) -> Any:
    return run.loader(Numbers(), batch_size=4, num_workers=2)


def different_streams(run: Any) -> Any:
    return run.loader(Numbers(by_rank=True), batch_size=4)


def sharded(run: Any) -> Any:
    return run.loader(Numbers(by_rank=True), batch_size=4, sharded=True, drop_last=False)


def inspected(ranks: Ranks, folder: Path, function: Callable[..., Any], *args: Any) -> Samples:
    ranks(function, 2, str(folder), *args)
    samples = read_samples(folder)
    assert samples is not None
    return samples


def levels(samples: Samples) -> list[str]:
    return [finding.level for finding in check_samples(samples)]


def test_a_map_style_data_set_is_not_read(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, map_style)
    assert levels(samples) == [GOOD, GOOD, GOOD]
    first = samples.ranks[0].batches[:2]
    assert [(batch.step, batch.micro, batch.worker, len(batch.keys)) for batch in first] == [(0, 0, 0, 1), (0, 1, 0, 1)]
    assert len(samples.epochs[1].counts) == 20


def test_a_last_batch_counts_its_samples_and_no_filler(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, tensors)
    assert levels(samples) == [GOOD, GOOD, WARNING]
    assert samples.epochs[0].order == list(range(10))


def test_streams(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, stream)
    assert levels(samples) == [GOOD, GOOD, GOOD]
    assert samples.ranks[1].batches[1].keys == [5, 7]
    assert samples.ranks[1].batches[1].worker == 1


def test_a_stream_that_differs_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = check_samples(inspected(ranks, tmp_path, record_loader, different_streams))
    assert (first.level, first.about) == (PROBLEM, "stream")
    assert "sharded=True" in first.hint
    assert {finding.level for finding in others} == {GOOD}


def test_a_stream_that_splits_itself(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, sharded)
    assert levels(samples) == [GOOD, GOOD, GOOD]
    assert len(samples.epochs[0].counts) == 34


def record_plain(folder: str, kind: str) -> None:
    dist.init_process_group("gloo")
    recorder = KeptRecorder(Path(folder), epochs=2, limit=None)
    PlainLoaders(recorder).install()
    data = TensorDataset(torch.arange(12.0))
    sampler = DistributedSampler(data) if kind == "forgets set_epoch" else None
    loader = DataLoader(Numbers() if kind == "stream" else data, batch_size=4, sampler=sampler, num_workers=2)
    evaluation = DataLoader(data, batch_size=4)
    with contextlib.suppress(Ended):
        for _ in range(3):
            assert sum(len(batch) if kind == "stream" else len(batch[0]) for batch in loader) > 0
            assert sum(len(batch[0]) for batch in evaluation) == 12
        raise AssertionError("the third epoch did not end the process")


@pytest.mark.parametrize(
    ("kind", "about", "words"),
    [
        ("forgets set_epoch", "order", "same order in every epoch"),
        ("no sampler", "epoch 0", "Every rank reads all 12 samples"),
        ("stream", "epoch 0", "The same contents as another sample"),
    ],
)
def test_plain_loaders_are_watched(kind: str, about: str, words: str, ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_plain, kind)
    assert samples.facts.kind == "DataLoader"
    assert [epoch.is_whole for epoch in samples.epochs] == [True, True]
    found = [finding for finding in check_samples(samples) if finding.about == about and words in finding.text]
    assert found, check_samples(samples)


def test_equal_items_have_equal_digests() -> None:
    item = {"x": torch.arange(4), "y": [b"bytes", "text", 3]}
    assert digest(item) == digest({"y": [b"bytes", "text", 3], "x": torch.arange(4)})
    assert len({digest(item), digest({**item, "x": torch.arange(4.0)}), digest({**item, "y": ["bytes"]})}) == 3
