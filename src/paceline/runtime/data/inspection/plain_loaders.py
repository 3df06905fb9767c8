"""Record the samples of torch's own DataLoader, while a script trains with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.contract.files.sample_records import CONTENT, INDEX, Batch, EpochEnd, LoaderFacts
from paceline.runtime.data.inspection.recorder import Recorder, digest, to_key
from paceline.runtime.data.item_source import ItemSource
from paceline.runtime.distributed.identity import read_identity


class PlainLoaders:
    """Watches the first DataLoader that the script iterates. Later ones, such as those of an evaluation, are not."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._first: Any = None  # a weak reference to the loader
        self._passes = 0

    def install(self) -> None:
        watch = self
        loaders: Any = DataLoader
        index_sampler: Any = loaders._index_sampler
        begin: Any = loaders.__iter__

        def watched_sampler(loader: DataLoader[Any]) -> Any:
            sampler = index_sampler.fget(loader)
            return _WatchedSampler(sampler, watch, loader) if watch._is_watched(loader) else sampler

        def watched_iter(loader: DataLoader[Any]) -> Iterator[Any]:
            if not watch._choose(loader):
                return begin(loader)  # type: ignore[no-any-return]
            watch._begin_pass()
            batches = begin(loader)
            return watch._digest_batches(batches, loader) if _is_iterable(loader) else batches

        loaders._index_sampler = property(watched_sampler)
        loaders.__iter__ = watched_iter

    def _choose(self, loader: DataLoader[Any]) -> bool:
        """Return whether this is the loader to watch; the first one that comes is."""
        if self._first is None and not self.recorder.has_begun and not _is_ours(loader):
            self._first = weakref.ref(loader)
            self.recorder.begin(_facts(loader))
        return self._is_watched(loader)

    def _is_watched(self, loader: DataLoader[Any]) -> bool:
        return self._first is not None and self._first() is loader

    def _begin_pass(self) -> None:
        if self._passes == self.recorder.epochs:
            self.recorder.end_process()
        self._passes += 1

    def add(self, step: int, keys: list[Any], worker: int | None, digests: list[str]) -> None:
        if self.recorder.limit is None or step < self.recorder.limit:
            self.recorder.add(Batch(self._passes - 1, step, 0, worker, [to_key(key) for key in keys], digests))

    def end_pass(self, steps: int) -> None:
        if self.recorder.limit is None or steps <= self.recorder.limit:
            self.recorder.add(EpochEnd(self._passes - 1))

    def _digest_batches(self, batches: Any, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a stream, whose items are known by their contents alone."""
        step = 0
        for batch in batches:
            digests = [digest(item) for item in _split(batch, batched=loader.batch_size is not None)]
            self.add(step, digests, None, digests)
            step += 1
            yield batch
        self.end_pass(step)


class _WatchedSampler:
    """A loader's sampler: what it yields is what the rank gets, in that order."""

    def __init__(self, sampler: Any, watch: PlainLoaders, loader: DataLoader[Any]) -> None:
        self._sampler, self._watch = sampler, watch
        self._workers = loader.num_workers
        self._yields_keys = not _is_iterable(loader)

    def __iter__(self) -> Iterator[Any]:
        step = 0
        for drawn in self._sampler:
            if self._yields_keys:
                keys = list(drawn) if isinstance(drawn, (list, tuple)) else [drawn]
                self._watch.add(step, keys, step % self._workers if self._workers else None, [])
            step += 1
            yield drawn
        if self._yields_keys:
            self._watch.end_pass(step)

    def __len__(self) -> int:
        return len(self._sampler)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _is_ours(loader: DataLoader[Any]) -> bool:
    """Return whether it is a part of a loader of `run.loader` or `run.evaluate`."""
    return (
        type(loader.batch_sampler).__module__ == ItemSource.__module__ or "paceline." in type(loader.dataset).__module__
    )


def _facts(loader: DataLoader[Any]) -> LoaderFacts:
    identity = read_identity()
    sampler = loader.sampler
    shuffled = True if isinstance(sampler, RandomSampler) else getattr(sampler, "shuffle", None)
    if isinstance(sampler, SequentialSampler):
        shuffled = False
    try:
        samples = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        samples = None
    is_iterable = _is_iterable(loader)
    return LoaderFacts(
        identity.rank, identity.world_size, "DataLoader", CONTENT if is_iterable else INDEX,
        samples=None if is_iterable else samples, batch_size=loader.batch_size, num_workers=loader.num_workers,
        shuffled=None if is_iterable else shuffled, drop_last=loader.drop_last, dataset=type(loader.dataset).__name__,
        sampler="" if is_iterable else type(sampler).__name__,
    )  # fmt: skip


def _split(batch: Any, *, batched: bool) -> list[Any]:
    """Return the items of a collated batch."""
    if not batched:
        return [batch]
    if isinstance(batch, dict):
        parts = [_split(value, batched=True) for value in batch.values()]
    elif isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], (str, bytes, int, float)):
        parts = [_split(value, batched=True) for value in batch]
    else:
        return list(batch)
    return [list(fields) for fields in zip(*parts, strict=False)]
