"""Records which samples this rank gets: the file of each loader, and a watch over torch's own
DataLoader, while a script trains with it.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.contract.rank_records import (
    CONTENT,
    INDEX,
    Batch,
    EpochEnd,
    EpochStart,
    Items,
    LoaderFacts,
    Record,
    Trained,
    record_path,
    write_record,
)
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.randomness import seed_host

COMPARED_ITEMS = 8  # at the beginning of a map-style dataset


class LoaderRecords:
    """The file of one loader."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, record: Record) -> None:
        write_record(self._file, record)


class Recorder:
    """What to record of the loaders of this rank, and where."""

    def __init__(self, folder: Path, *, epochs: int, limit: int | None) -> None:
        self.epochs, self.limit = epochs, limit  # limit: steps of each epoch
        self._folder = folder
        self._loaders = 0

    def begin(self, facts: LoaderFacts) -> LoaderRecords:
        """Return the records of another loader."""
        file = record_path(self._folder, facts.rank, self._loaders).open("w", encoding="utf-8")
        records = LoaderRecords(file)
        records.add(replace(facts, number=self._loaders))
        self._loaders += 1
        return records

    def end_process(self) -> NoReturn:
        """End this rank here: all has been recorded, and training would only take time."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def read_items(dataset: Any) -> Items:
    """Read the first items of a map-style dataset twice, both times with the same random
    numbers.
    """
    digests: list[str | None] = []
    try:
        for index in range(min(COMPARED_ITEMS, len(dataset))):
            found = set()
            for _ in range(2):
                seed_host(index)
                found.add(digest(dataset[index]))
            digests.append(found.pop() if len(found) == 1 else None)
    except Exception:  # whatever the script's dataset raises: then its items are not known
        return Items([])
    return Items(digests)


def to_key(key: Any) -> int | str:
    """Return a sample's key in a form that can be written."""
    try:
        return operator.index(key)  # also of NumPy and of a tensor
    except TypeError:
        return repr(key)


def digest(item: Any) -> str:
    """Return a short digest of an item's contents."""
    state = hashlib.blake2b(digest_size=8)
    waiting = [item]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            thing = thing.detach().cpu().contiguous()
            state.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            state.update(
                thing.flatten().view(torch.uint8).numpy().tobytes() if thing.numel() else b""
            )
        elif isinstance(thing, Mapping):
            # A WebDataset sample names the file that it comes from: that belongs to it.
            waiting += [each for pair in sorted(thing.items(), key=repr) for each in pair]
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, bytes):
            state.update(thing)
        elif hasattr(thing, "tobytes"):
            state.update(thing.tobytes())
        else:
            state.update(repr(thing).encode())
        state.update(b";")
    return state.hexdigest()


class _WatchedLoader:
    """A DataLoader, and those that the script makes anew in its place."""

    def __init__(self, loader: DataLoader[Any], records: LoaderRecords) -> None:
        self.records, self.kind, self.dataset = records, _kind(loader), loader.dataset
        self.loader: weakref.ref[Any] = weakref.ref(loader)
        # keys of batches that were drawn, and not handed out yet
        self.drawn: deque[list[Any]] = deque()
        self.passes = 0
        self.last: _WatchedIterator | None = None
        self.is_trained = False

    def mark(self) -> None:
        """Note that its batches reach a backward pass."""
        if not self.is_trained:
            self.is_trained = True
            self.records.add(Trained())


class PlainLoaders:
    """Watches all DataLoaders that the script iterates."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._watched: list[_WatchedLoader] = []
        self._latest: _WatchedLoader | None = None  # that gave a batch
        self._is_finished = False

    def install(self) -> None:
        watch = self
        loaders: Any = DataLoader
        index_sampler: Any = loaders._index_sampler
        begin: Any = loaders.__iter__

        def watched_sampler(loader: DataLoader[Any]) -> Any:
            sampler = index_sampler.fget(loader)
            in_batches = loader.batch_sampler is not None
            watched = watch._find(loader)
            return (
                sampler
                if watched is None
                else _WatchedSampler(sampler, watched, in_batches=in_batches)
            )

        def watched_iter(loader: DataLoader[Any]) -> Iterator[Any]:
            watched = None if _is_ours(loader) else watch._watch(loader)
            if watched is None or not watch._begin_pass(watched):
                return begin(loader)  # type: ignore[no-any-return]
            watched.last = _WatchedIterator(begin(loader), watch, watched, loader)
            return watched.last

        loaders._index_sampler = property(watched_sampler)
        loaders.__iter__ = watched_iter
        engine: Any = torch.autograd
        for name in ("backward", "grad"):
            setattr(engine, name, self._noting(getattr(engine, name)))

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._latest is not None:
                self._latest.mark()
            return original(*args, **kwargs)

        return wrapped

    def note_batch(self, watched: _WatchedLoader) -> None:
        if torch.is_grad_enabled():  # else it is for an evaluation
            self._latest = watched

    def finish(self) -> None:
        """Record items of the datasets, so that those of all ranks can be compared. The script has
        done its work.
        """
        if not self._is_finished:
            self._is_finished = True
            for watched in self._watched:
                if watched.is_trained and not isinstance(watched.dataset, IterableDataset):
                    watched.records.add(read_items(watched.dataset))

    def is_limited(self, watched: _WatchedLoader) -> bool:
        """Return whether a loader ends after the first steps: one that is trained on, or else the
        first one.
        """
        return watched.is_trained or (watched is self._watched[0] and not self._has_trained)

    @property
    def _has_trained(self) -> bool:
        return any(each.is_trained for each in self._watched)

    def _find(self, loader: DataLoader[Any]) -> _WatchedLoader | None:
        return next((each for each in self._watched if each.loader() is loader), None)

    def _watch(self, loader: DataLoader[Any]) -> _WatchedLoader:
        found = self._find(loader)
        if found is None:
            kind = _kind(loader)
            found = next(
                (each for each in self._watched if each.loader() is None and each.kind == kind),
                None,
            )
            if found is None:
                found = _WatchedLoader(loader, self.recorder.begin(_facts(loader)))
                self._watched.append(found)
            found.loader = weakref.ref(loader)  # made anew for each epoch
        return found

    def _begin_pass(self, watched: _WatchedLoader) -> bool:
        """Return whether the pass that begins is to be recorded. A look at the first batch was
        none.
        """
        if watched.last is not None and watched.last.was_a_look:
            watched.passes -= 1
        if watched.passes >= self.recorder.epochs:
            if watched.is_trained or not self._has_trained:
                self.finish()
                self.recorder.end_process()
            watched.last = None
            return False
        watched.passes += 1
        watched.drawn.clear()
        watched.records.add(EpochStart(watched.passes - 1))
        return True


class _WatchedSampler:
    """A loader's sampler. Workers make it draw ahead of what the script gets."""

    def __init__(self, sampler: Any, watched: _WatchedLoader, *, in_batches: bool) -> None:
        self._sampler, self._watched, self._in_batches = sampler, watched, in_batches

    def __iter__(self) -> Iterator[Any]:
        for drawn in self._sampler:
            self._watched.drawn.append(
                list(drawn) if self._in_batches or isinstance(drawn, list) else [drawn]
            )
            yield drawn

    def __len__(self) -> int:
        return len(self._sampler)


class _WatchedIterator:
    """Records each batch as the script gets it."""

    def __init__(
        self,
        batches: Iterator[Any],
        watch: PlainLoaders,
        watched: _WatchedLoader,
        loader: DataLoader[Any],
    ) -> None:
        self._batches, self._watch, self._watched, self._epoch = (
            batches,
            watch,
            watched,
            watched.passes - 1,
        )
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
        limit, records = self._watch.recorder.limit, self._watched.records
        if limit is not None and self._steps >= limit and self._watch.is_limited(self._watched):
            self._has_ended = True
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._has_ended:
                self._has_ended = True
                records.add(EpochEnd(self._epoch))
            raise
        if self._reads_stream:
            worker, keys = (
                None,
                [digest(item) for item in split_batch(batch, is_batched=self._is_batched)],
            )
            records.add(Batch(self._epoch, self._steps, 0, worker, list(keys), keys))
        else:
            worker = self._steps % self._workers if self._workers else None
            drawn = [to_key(key) for key in self._watched.drawn.popleft()]
            records.add(Batch(self._epoch, self._steps, 0, worker, drawn))
        self._watch.note_batch(self._watched)
        self._steps += 1
        return batch


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _is_ours(loader: DataLoader[Any]) -> bool:
    """Return whether it is a part of a loader of `run.loader` or `run.evaluate`."""
    parts = (type(loader.batch_sampler), type(loader.dataset))
    return any(part.__module__.startswith("paceline.") for part in parts)


def _kind(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what two loaders share of which one takes the other's place in the next epoch."""
    return (
        type(loader.dataset),
        _length(loader),
        loader.batch_size,
        type(_sampler(loader)),
        loader.drop_last,
    )


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
    name = (
        "DistributedSampler" if isinstance(sampler, DistributedSampler) else type(sampler).__name__
    )
    if getattr(sampler, "replacement", False) and isinstance(sampler, RandomSampler):
        name = "RandomSampler(replacement=True)"
    return LoaderFacts(
        identity.rank,
        identity.world_size,
        "DataLoader",
        CONTENT if is_stream else INDEX,
        samples=None if is_stream else _length(loader),
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        shuffled=None if is_stream or not isinstance(shuffled, bool) else shuffled,
        drop_last=loader.drop_last or bool(getattr(sampler, "drop_last", False)),
        dataset=type(loader.dataset).__name__,
        sampler="" if is_stream else name,
    )


def split_batch(batch: Any, *, is_batched: bool = True) -> list[Any]:
    """Return the items of a collated batch, or the batch as one item if it is not clear how to
    split it.
    """
    if not is_batched:
        return [batch]
    columns = _columns(batch)
    sizes = Counter(len(column) for column in columns)
    if not sizes:
        return [batch]
    size = sizes.most_common(1)[0][0]
    return [
        list(fields)
        for fields in zip(*(column for column in columns if len(column) == size), strict=True)
    ]


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
    return [
        column for value in getattr(batch, "__dict__", {}).values() for column in _columns(value)
    ]
