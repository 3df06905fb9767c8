"""What the ranks record of their loaders, on real ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import paceline
from paceline.runtime import loop
from paceline.runtime.data.inspection import SampleRecorder, digest
from paceline.spec.findings import GOOD, PROBLEM, WARNING
from paceline.tools.inspect.samples import Samples, check_samples, read_samples
from tests.forked_ranks import Ranks


class Ended(Exception):
    """The process would have ended here."""


class KeptRecorder(SampleRecorder):
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
    loop.inspector = KeptRecorder(Path(folder), limit=0).walk
    with contextlib.suppress(Ended), paceline.session(seed=3) as run:
        for _ in run.steps(make(run)):
            break
        raise AssertionError("the loop did not end the process")


def map_style(run: Any) -> Any:
    return run.loader(Unreadable(), batch_size=4, accumulate=2, num_workers=1)


def tensors(run: Any) -> Any:
    return run.loader(
        TensorDataset(torch.arange(10.0)), batch_size=4, drop_last=False, shuffle=False
    )


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
    assert len(samples.ranks[0].batches[0, 0]["keys"]) == 2
    assert len(samples.epochs[1].counts) == 20


def test_a_last_batch_counts_its_samples_and_no_filler(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, tensors)
    assert levels(samples) == [GOOD, GOOD, WARNING]
    assert samples.epochs[0].keys == {0: [0, 1, 4, 5, 8], 1: [2, 3, 6, 7, 9]}


def test_streams(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, stream)
    assert levels(samples) == [GOOD, GOOD, GOOD]
    assert [key.partition(":")[0] for key in samples.ranks[1].batches[0, 1]["keys"]] == ["5", "7"]


def test_a_stream_that_differs_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = check_samples(inspected(ranks, tmp_path, record_loader, different_streams))
    assert (first.level, first.about) == (PROBLEM, "dataset")
    assert "sharded=True" in first.hint
    assert [finding.about for finding in others] == ["order"], "its samples are not called complete"


def test_a_stream_that_splits_itself(ranks: Ranks, tmp_path: Path) -> None:
    samples = inspected(ranks, tmp_path, record_loader, sharded)
    assert levels(samples) == [GOOD, GOOD, GOOD]
    assert len(samples.epochs[0].counts) == 34


class EveryOther:
    """A batch sampler of a script: it shuffles by the epoch, which nobody tells it."""

    def __iter__(self) -> Iterator[list[Any]]:
        order = numpy.random.default_rng(0).permutation(12)
        yield from (list(order[first::6]) for first in range(dist.get_rank(), 6, 2))

    def __len__(self) -> int:
        return 3


def record_plain(folder: str, kind: str) -> None:
    dist.init_process_group("gloo")
    KeptRecorder(Path(folder), limit=2 if kind == "endless" else 0).watch_dataloaders()
    data = TensorDataset(torch.arange(12.0))
    source: Any = {"stream": Numbers(), "endless": Endless()}.get(kind, data)
    workers = 2 if kind in ("stream", "leaves early") else 0
    evaluation = DataLoader(data, batch_size=4)

    def make() -> Any:
        if kind == "batch sampler":
            return DataLoader(data, batch_sampler=EveryOther())
        splits = kind in ("forgets set_epoch", "looks first", "is made anew", "leaves early")
        sampler = DistributedSampler(data) if splits else None
        return DataLoader(
            source, batch_size=2 if splits else 4, sampler=sampler, num_workers=workers
        )

    loader = make()
    with contextlib.suppress(Ended):
        if kind == "looks first":
            next(iter(loader))
        for epoch in range(3):
            if kind == "is made anew" and epoch:
                del loader
                loader = make()
            for step, _ in enumerate(loader):
                if kind == "leaves early" and step == 1:
                    break
            assert sum(len(batch[0]) for batch in evaluation) == 12
        raise AssertionError("the third epoch did not end the process")


def train_plain(folder: str, kind: str) -> None:
    """Train, after an evaluation on data that is split; the training is not, or twice, or has data of its own."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    KeptRecorder(Path(folder), limit=0).watch_dataloaders()
    values = torch.arange(24.0).reshape(-1, 1)
    data, tests = TensorDataset(values), TensorDataset(values[:8])
    if kind != "unsplit":
        data = TensorDataset(values[rank::world_size])
    sampler = DistributedSampler(data) if kind == "split twice" else None
    loader = DataLoader(data, batch_size=3, shuffle=sampler is None, sampler=sampler)
    test: Any = DataLoader(tests, batch_size=2, sampler=DistributedSampler(tests))
    weight = torch.ones(1, requires_grad=True)
    with contextlib.suppress(Ended):
        for epoch in range(3):
            test.sampler.set_epoch(epoch)
            for (x,) in test:
                with torch.no_grad():
                    (weight * x).sum()
            if sampler is not None:
                sampler.set_epoch(epoch)
            for (x,) in loader:
                (weight * x).sum().backward()  # type: ignore[no-untyped-call]
        raise AssertionError("the third epoch did not end the process")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "unsplit",
            [
                (PROBLEM, "Every rank reads all 24"),
                (PROBLEM, "Every rank reads all 24"),
                (GOOD, "differs"),
            ],
        ),
        (
            "split twice",
            [(PROBLEM, "item 0 differs. DistributedSampler splits it again"), (GOOD, "differs")],
        ),
        (
            "own data",
            [(GOOD, "all 24 samples once"), (GOOD, "all 24 samples once"), (GOOD, "differs")],
        ),
    ],
)
def test_the_loader_that_is_trained_on_is_judged_by_its_data(
    kind: str, expected: list[tuple[str, str]], ranks: Ranks, tmp_path: Path
) -> None:
    samples = inspected(ranks, tmp_path, train_plain, kind)
    assert samples.facts.samples == (24 if kind == "unsplit" else 12)
    findings = check_samples(samples)
    assert [finding.level for finding in findings] == [level for level, _ in expected], findings
    assert all(
        words in finding.text for finding, (_, words) in zip(findings, expected, strict=True)
    ), findings


def own_part(run: Any) -> Any:
    return run.loader(TensorDataset(torch.arange(16.0)[run.rank :: run.world_size]), batch_size=4)


def test_a_data_set_that_is_split_before_run_loader_splits_it(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = check_samples(inspected(ranks, tmp_path, record_loader, own_part))
    assert (first.level, first.about) == (PROBLEM, "dataset")
    assert "nobody reads the rest" in first.text
    assert [finding.about for finding in others] == ["order"], "its samples are not called complete"


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([each, dist.get_rank()]) for each in itertools.count())


@pytest.mark.parametrize(
    ("kind", "expected", "whole"),
    [
        ("forgets set_epoch", "order: same order in", True),
        ("looks first", "order: same order in", True),
        ("is made anew", "order: same order in", True),
        ("batch sampler", "order: same order in", True),
        ("leaves early", "epoch 0: 4 samples of the steps seen once", False),
        ("no sampler", "epoch 0: Every rank reads all 12 samples", True),
        ("stream", "epoch 0: Every rank reads all 17 samples", True),
        ("endless", "epoch 1: 16 samples of the steps seen once", False),
    ],
)
def test_plain_loaders_are_watched(
    kind: str, expected: str, whole: bool, ranks: Ranks, tmp_path: Path
) -> None:
    samples = inspected(ranks, tmp_path, record_plain, kind)
    assert samples.facts.kind == "DataLoader"
    assert [epoch.is_whole for epoch in samples.epochs] == [whole, whole]
    assert (
        all(isinstance(key, int) for key in samples.epochs[0].counts)
        or samples.facts.samples is None
    )
    about, words = expected.split(": ")
    found = [
        finding
        for finding in check_samples(samples)
        if finding.about == about and words in finding.text
    ]
    assert found, check_samples(samples)


def test_equal_items_have_equal_digests() -> None:
    item = {"x": torch.arange(4), "y": [b"bytes", "text", 3]}
    assert digest(item) == digest({"y": [b"bytes", "text", 3], "x": torch.arange(4)})
    assert (
        len(
            {
                digest(item),
                digest({**item, "x": torch.arange(4.0)}),
                digest({**item, "y": ["bytes"]}),
            }
        )
        == 3
    )
