"""Run a script, and record which samples its loaders give to this rank: `python -m ... FOLDER
EPOCHS LIMIT SCRIPT`. For `paceline inspect data`.

Loaders of `run.loader` are read without training: the first loop of `run.steps` reads them for all
epochs, and the process ends. Of a map-style dataset only the first items are read, to compare them
between ranks. Any other script trains as usual, and ends when a DataLoader whose batches reach a
backward pass begins the epoch after the last one.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import get_worker_info

from paceline.contract.rank_records import (
    CONTENT,
    INDEX,
    POSITION,
    Batch,
    EpochEnd,
    LoaderFacts,
    Trained,
)
from paceline.runtime import loop
from paceline.runtime.data.item_source import ItemSource
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.data.sample_order import Sampled
from paceline.runtime.data.sample_recorder import (
    LoaderRecords,
    PlainLoaders,
    Recorder,
    digest,
    read_items,
    to_key,
)
from paceline.runtime.data.sharded_iterable import RankBatches
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.webdataset import SeededPipeline
from paceline.runtime.data.workers import LoaderOptions

COMPARED = 100  # items at the beginning of a stream, which must be the same on every rank


class LoaderWalk:
    """Called with the loader of the first loop of `run.steps`. It does not return."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, loader: MapLoader | StreamLoader) -> NoReturn:
        dataset = loader.dataset
        if isinstance(loader, MapLoader):
            records = self.recorder.begin(self._map_facts(loader))
            loader.dataset = _Keys(loader.plan.samples)
            options = LoaderOptions(
                num_workers=loader.options.num_workers,
                collate_fn=_with_worker,
                multiprocessing_context=loader.options.multiprocessing_context,
            )
            loader.source = ItemSource(
                loader.dataset, options, seed=loader.seed, rank=loader.plan.identity.rank
            )
        else:
            records = self.recorder.begin(self._stream_facts(loader))
            batches = loader._batches
            batches.source.dataset = _Items(batches.source.dataset, loader.seed)
            batches.collate_fn = _with_worker
        records.add(Trained())
        for epoch in range(self.recorder.epochs):
            by_content = isinstance(loader, StreamLoader) and loader.sharded
            self._read_epoch(loader, epoch, records, by_content=by_content)
        if isinstance(loader, MapLoader):
            records.add(read_items(dataset))
        loader.close()
        self.recorder.end_process()

    def _read_epoch(
        self,
        loader: MapLoader | StreamLoader,
        epoch: int,
        records: LoaderRecords,
        *,
        by_content: bool,
    ) -> None:
        is_whole = True
        for micro in loader.micro_batches(epoch, 0):
            if self.recorder.limit is not None and micro.step >= self.recorder.limit:
                is_whole = False
                break
            items = micro.data[: micro.count]
            digests = [each[2] for each in items if len(each) > 2]
            keys = digests if by_content else [to_key(each[1]) for each in items]
            worker = items[0][0] if items else None
            records.add(Batch(epoch, micro.step, micro.index, worker, list(keys), digests))
        if is_whole:
            records.add(EpochEnd(epoch))

    def _map_facts(self, loader: MapLoader) -> LoaderFacts:
        identity, order = loader.plan.identity, loader.order
        return LoaderFacts(
            identity.rank,
            identity.world_size,
            "run.loader",
            INDEX,
            samples=loader.plan.samples,
            batch_size=loader.batch_size,
            accumulate=loader.accumulate,
            num_workers=loader.options.num_workers,
            shuffled=loader.shuffle,
            drop_last=loader.plan.drop_last,
            dataset=type(loader.dataset).__name__,
            sampler=type(order.sampler).__name__ if isinstance(order, Sampled) else "",
        )

    def _stream_facts(self, loader: StreamLoader) -> LoaderFacts:
        identity = loader.identity
        return LoaderFacts(
            identity.rank,
            identity.world_size,
            "run.loader",
            CONTENT if loader.sharded else POSITION,
            batch_size=loader.batch_size,
            accumulate=loader.accumulate,
            num_workers=loader.options.num_workers,
            drop_last=loader.drop_last,
            dataset=type(loader.dataset).__name__,
            beginning=[] if loader.sharded else _read_beginning(loader._batches),
        )


def _read_beginning(batches: RankBatches) -> list[str]:
    batches.source.set_epoch(0)
    return [digest(item) for _, item in islice(batches.source.stream(), COMPARED)]


class _Keys:
    """A dataset whose items are their own keys: what is read doesn't matter, only which."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __getitem__(self, key: Any) -> Any:
        return key

    def __len__(self) -> int:
        return self.samples


class _Item(NamedTuple):
    """An item of a stream: its number in it, and what it holds."""

    number: int
    digest: str


class _Items:
    """A stream whose items say which they are."""

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.dataset, SeededPipeline):
            self.dataset.seed = self.seed
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[_Item]:
        for number, item in enumerate(self.dataset):
            yield _Item(number, digest(item))


def _with_worker(items: list[Any]) -> list[tuple[Any, ...]]:
    """Collate: keep the items, each with the number of the worker that reads it."""
    info = get_worker_info()
    worker = info.id if info is not None else None
    return [(worker, *(item if isinstance(item, _Item) else (item,))) for item in items]


def main(folder: str, epochs: str, limit: str, *program: str) -> None:
    recorder = Recorder(Path(folder), epochs=int(epochs), limit=int(limit) or None)
    loop.inspector = LoaderWalk(recorder)
    loaders = PlainLoaders(recorder)
    loaders.install()
    try:
        if program[0] == "-m":
            sys.argv[:] = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = list(program)
            sys.path[0:0] = [str(Path(program[0]).resolve().parent)]
            runpy.run_path(program[0], run_name="__main__")
    finally:
        loaders.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
