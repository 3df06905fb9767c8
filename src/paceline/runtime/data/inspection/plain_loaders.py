"""Record the samples of torch's own DataLoader, while a script trains with it."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.contract.files.sample_records import CONTENT, INDEX, Batch, EpochEnd, EpochStart, LoaderFacts
from paceline.runtime.data.inspection.recorder import Recorder, digest, to_key
from paceline.runtime.data.item_source import ItemSource
from paceline.runtime.distributed.identity import read_identity


class PlainLoaders:
    """Watches the first DataLoader that the script iterates, and those that it makes anew in its place."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.drawn: deque[list[Any]] = deque()  # keys of batches that were drawn, and not handed out yet
        self._loader: Any = None  # a weak reference
        self._kind: Any = None  # of the loader
        self._passes = 0
        self._last: _WatchedIterator | None = None

    def install(self) -> None:
        watch = self
        loaders: Any = DataLoader
        index_sampler: Any = loaders._index_sampler
        begin: Any = loaders.__iter__

        def watched_sampler(loader: DataLoader[Any]) -> Any:
            sampler = index_sampler.fget(loader)
            in_batches = loader.batch_sampler is not None
            return _WatchedSampler(sampler, watch, in_batches=in_batches) if watch._is_watched(loader) else sampler

        def watched_iter(loader: DataLoader[Any]) -> Iterator[Any]:
            if not watch._choose(loader):
                return begin(loader)  # type: ignore[no-any-return]
            epoch = watch._begin_pass()
            watch._last = _WatchedIterator(begin(loader), watch, loader, epoch)
            return watch._last

        loaders._index_sampler = property(watched_sampler)
        loaders.__iter__ = watched_iter

    def _choose(self, loader: DataLoader[Any]) -> bool:
        """Return whether this is a loader to watch; the first one that comes is."""
        if self._loader is None and not self.recorder.has_begun and not _is_ours(loader):
            self._loader, self._kind = weakref.ref(loader), _kind(loader)
            self.recorder.begin(_facts(loader))
        elif self._loader is not None and self._loader() is None and _kind(loader) == self._kind:
            self._loader = weakref.ref(loader)  # made anew for each epoch
        return self._is_watched(loader)

    def _is_watched(self, loader: DataLoader[Any]) -> bool:
        return self._loader is not None and self._loader() is loader

    def _begin_pass(self) -> int:
        """Return the number of the pass that begins. A look at the first batch was none."""
        if self._last is not None and self._last.was_a_look:
            self._passes -= 1
        if self._passes == self.recorder.epochs:
            self.recorder.end_process()
        self._passes += 1
        self.drawn.clear()
        self.recorder.add(EpochStart(self._passes - 1))
        return self._passes - 1


class _WatchedSampler:
    """A loader's sampler. Workers make it draw ahead of what the script gets."""

    def __init__(self, sampler: Any, watch: PlainLoaders, *, in_batches: bool) -> None:
        self._sampler, self._watch, self._in_batches = sampler, watch, in_batches

    def __iter__(self) -> Iterator[Any]:
        for drawn in self._sampler:
            self._watch.drawn.append(list(drawn) if self._in_batches or isinstance(drawn, list) else [drawn])
            yield drawn

    def __len__(self) -> int:
        return len(self._sampler)


class _WatchedIterator:
    """Records each batch as the script gets it."""

    def __init__(self, batches: Iterator[Any], watch: PlainLoaders, loader: DataLoader[Any], epoch: int) -> None:
        self._batches, self._watch, self._epoch = batches, watch, epoch
        self._reads_stream, self._is_batched = _is_stream(loader), loader.batch_size is not None
        self._workers = loader.num_workers
        self._steps, self._has_ended = 0, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    @property
    def was_a_look(self) -> bool:
        return self._steps <= 1 and not self._has_ended

    def __next__(self) -> Any:
        recorder = self._watch.recorder
        if recorder.limit is not None and self._steps >= recorder.limit:
            self._has_ended = True
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._has_ended:
                self._has_ended = True
                recorder.add(EpochEnd(self._epoch))
            raise
        if self._reads_stream:
            worker, keys = None, [digest(item) for item in split_batch(batch, is_batched=self._is_batched)]
            recorder.add(Batch(self._epoch, self._steps, 0, worker, list(keys), keys))
        else:
            worker = self._steps % self._workers if self._workers else None
            drawn = [to_key(key) for key in self._watch.drawn.popleft()]
            recorder.add(Batch(self._epoch, self._steps, 0, worker, drawn))
        self._steps += 1
        return batch


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _is_ours(loader: DataLoader[Any]) -> bool:
    """Return whether it is a part of a loader of `run.loader` or `run.evaluate`."""
    modules = (type(loader.batch_sampler).__module__, type(loader.dataset).__module__)
    return ItemSource.__module__ in modules or any(module.startswith("paceline.") for module in modules)


def _kind(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what two loaders share of which one takes the other's place in the next epoch."""
    return type(loader.dataset), _length(loader), loader.batch_size, type(_sampler(loader)), loader.drop_last


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return None if _is_stream(loader) else len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what decides the order: the sampler, or a batch sampler of the script's own."""
    batches = loader.batch_sampler
    return loader.sampler if batches is None or type(batches) is BatchSampler else batches


def _facts(loader: DataLoader[Any]) -> LoaderFacts:
    identity, sampler, is_stream = read_identity(), _sampler(loader), _is_stream(loader)
    shuffled = getattr(sampler, "shuffle", None)
    if isinstance(sampler, (RandomSampler, SequentialSampler)):
        shuffled = isinstance(sampler, RandomSampler)
    name = "DistributedSampler" if isinstance(sampler, DistributedSampler) else type(sampler).__name__
    if getattr(sampler, "replacement", False) and isinstance(sampler, RandomSampler):
        name = "RandomSampler(replacement=True)"
    return LoaderFacts(
        identity.rank, identity.world_size, "DataLoader", CONTENT if is_stream else INDEX,
        samples=None if is_stream else _length(loader), batch_size=loader.batch_size, num_workers=loader.num_workers,
        shuffled=None if is_stream or not isinstance(shuffled, bool) else shuffled,
        drop_last=loader.drop_last or bool(getattr(sampler, "drop_last", False)),
        dataset=type(loader.dataset).__name__, sampler="" if is_stream else name,
    )  # fmt: skip


def split_batch(batch: Any, *, is_batched: bool = True) -> list[Any]:
    """Return the items of a collated batch, or the batch as one item if it is not clear how to split it."""
    if not is_batched:
        return [batch]
    columns = _columns(batch)
    sizes = Counter(len(column) for column in columns)
    if not sizes:
        return [batch]
    size = sizes.most_common(1)[0][0]
    return [list(fields) for fields in zip(*(column for column in columns if len(column) == size), strict=True)]


def _columns(batch: Any) -> list[list[Any]]:
    """Return the fields of a batch that have one entry per item."""
    if isinstance(batch, Mapping):
        return [column for value in batch.values() for column in _columns(value)]
    if isinstance(batch, (str, bytes)):
        return []
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(each, (str, bytes, int, float)) for each in batch):
            return [list(batch)]
        return [column for value in batch for column in _columns(value)]
    if getattr(batch, "shape", ()):
        return [list(batch)]
    return [column for value in getattr(batch, "__dict__", {}).values() for column in _columns(value)]
