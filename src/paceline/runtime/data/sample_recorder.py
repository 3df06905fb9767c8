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
from collections.abc import Callable, Mapping
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
    dataloader,
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
        self.passes = 0
        self.last: _Pass | None = None
        self.is_trained = False

    def mark(self) -> None:
        """Note that its batches reach a backward pass."""
        if not self.is_trained:
            self.is_trained = True
            self.records.add(Trained())


class _Pass:
    """One pass over a watched loader."""

    def __init__(self, watched: _WatchedLoader, loader: DataLoader[Any]) -> None:
        self.watched, self.epoch = watched, watched.passes - 1
        self.steps = 0
        self.has_ended = False
        self._reads_stream, self._is_batched = _is_stream(loader), loader.batch_size is not None
        self._workers = loader.num_workers

    @property
    def was_a_look(self) -> bool:
        return self.steps <= 1 and not self.has_ended

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.watched.records.add(EpochEnd(self.epoch))

    def add(self, batch: Any, asked: Any) -> None:
        """Record a batch. `asked` is what the loader has asked the dataset for."""
        if self._reads_stream:
            items = split_batch(batch, is_batched=self._is_batched)
            keys = [digest(item) for item in items]
            record = Batch(self.epoch, self.steps, 0, None, list(keys), keys)
        else:
            worker = self.steps % self._workers if self._workers else None
            drawn = [to_key(key) for key in (asked if isinstance(asked, list) else [asked])]
            record = Batch(self.epoch, self.steps, 0, worker, drawn)
        self.watched.records.add(record)
        self.steps += 1


class PlainLoaders:
    """Watches all DataLoaders that the script iterates."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._watched: list[_WatchedLoader] = []
        self._latest: _WatchedLoader | None = None  # that gave a batch
        self._is_finished = False

    def install(self) -> None:
        wrap(DataLoader, "__iter__", self._begin)
        wrap(dataloader._BaseDataLoaderIter, "_next_index", note_asked)
        wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        for name in ("backward", "grad"):
            wrap(torch.autograd, name, self._backward)

    def _begin(self, original: Any, loader: DataLoader[Any]) -> Any:
        watched = None if _is_ours(loader) else self._watch(loader)
        is_recorded = watched is not None and self._begin_pass(watched)
        if loader.persistent_workers and loader._iterator is not None:
            loader._iterator._paceline_asked.clear()  # type: ignore[attr-defined]
        batches = original(loader)
        batches._paceline_pass = None
        if watched is not None and is_recorded:
            batches._paceline_pass = watched.last = _Pass(watched, loader)
        return batches

    def _next(self, original: Any, batches: Any) -> Any:
        current: _Pass | None = batches._paceline_pass
        if current is None:
            return original(batches)
        limit, watched = self.recorder.limit, current.watched
        if limit is not None and current.steps >= limit and self.is_limited(watched):
            current.has_ended = True
            raise StopIteration
        try:
            batch = original(batches)
        except StopIteration:
            current.end()
            raise
        current.add(batch, batches._paceline_asked.popleft())
        if torch.is_grad_enabled():  # else it is for an evaluation
            self._latest = watched
        return batch

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._latest is not None:
            self._latest.mark()
        return original(*args, **kwargs)

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

    def _watch(self, loader: DataLoader[Any]) -> _WatchedLoader:
        kind = _kind(loader)
        for each in self._watched:
            if each.loader() is loader:
                return each
        for each in self._watched:
            if each.loader() is None and each.kind == kind:  # made anew for each epoch
                each.loader = weakref.ref(loader)
                return each
        self._watched.append(_WatchedLoader(loader, self.recorder.begin(_facts(loader))))
        return self._watched[-1]

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
        watched.records.add(EpochStart(watched.passes - 1))
        return True


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def note_asked(original: Any, batches: Any) -> Any:
    """Remember what a DataLoader asks its dataset for; with workers, it asks some batches ahead."""
    asked = original(batches)
    if not hasattr(batches, "_paceline_asked"):
        batches._paceline_asked = deque()
    batches._paceline_asked.append(asked)
    return asked


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
