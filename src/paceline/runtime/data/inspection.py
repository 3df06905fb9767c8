"""Record which samples this rank gets, for `paceline inspect data`: a file for each loader.

A loader of `run.loader` is read without training: the first loop of `run.steps` reads it for all
epochs, and the process ends. Of a map-style dataset only the first items are read, to compare them
between ranks. Any other script trains as usual, and ends when a DataLoader whose batches reach a
backward pass begins the epoch after the last one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    dataloader,
)

from paceline.contract import env
from paceline.contract.foreign_records import LineWriter
from paceline.contract.heartbeat_file import FINISHED
from paceline.contract.rank_records import (
    BATCH,
    EPOCH_END,
    ITEMS,
    LOADER,
    TRAINED,
    LoaderFacts,
    record_path,
)
from paceline.runtime import loop
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.data.sharded_iterable import ShardedIterable
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.transfer import parts_of
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.randomness import preserve_host_rng, seed_host
from paceline.runtime.settings import LaunchContext
from paceline.runtime.step_boundary.heartbeat import Heartbeat

EPOCHS = 2  # whose orders are compared
COMPARED_ITEMS = 8  # at the beginning of a dataset, which should be the same on every rank


def start_recorder() -> None:
    """Record as PACELINE_SAMPLES says: the steps of each epoch (0 for all), and the folder."""
    limit, _, folder = os.environ[env.SAMPLES].partition(":")
    recorder = SampleRecorder(Path(folder), limit=int(limit))
    loop.inspector = recorder.walk
    recorder.watch_dataloaders()


class SampleRecorder:
    """The records of this rank."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._files: dict[LoaderFacts, LineWriter] = {}
        self._passes: Counter[LoaderFacts] = Counter()
        self._trained: set[LoaderFacts] = set()
        self._backwards = 0

    def add(self, facts: LoaderFacts, record: str, **values: Any) -> None:
        """Add a record of a loader. The first one describes it."""
        if facts not in self._files:
            path = record_path(self.folder, facts.rank, len(self._files))
            self._files[facts] = LineWriter(path)
            self.add(facts, LOADER, **asdict(facts))
        self._files[facts].append(json.dumps({"record": record, **values}) + "\n")

    def end_process(self) -> NoReturn:
        """End this rank here: all has been recorded, and training would only take time."""
        sys.stdout.flush()
        sys.stderr.flush()
        # a rank that exits inside its session has failed
        file = LaunchContext.read().heartbeat_file
        Heartbeat(file, read_identity().local_rank).set_state(FINISHED)
        os._exit(0)

    # -- loaders of `run.loader`

    def walk(self, loader: MapLoader | StreamLoader) -> NoReturn:
        """Record all epochs of the loader of the first loop of `run.steps`."""
        if isinstance(loader, MapLoader):
            self._walk_map(loader)
        else:
            self._walk_stream(loader)
        loader.close()
        self.end_process()

    def _walk_map(self, loader: MapLoader) -> None:
        plan, sampler = loader.plan, getattr(loader.order, "sampler", None)
        facts = LoaderFacts(
            plan.identity.rank,
            plan.identity.world_size,
            "run.loader",
            samples=plan.samples,
            batch_size=loader.batch_size,
            num_workers=loader.options.num_workers,
            shuffled=loader.shuffle is not False,
            drop_last=plan.drop_last,
            dataset=type(loader.dataset).__name__,
            sampler="" if sampler is None else type(sampler).__name__,
        )
        for epoch in range(EPOCHS):
            keys = list(loader.draw_order(epoch, 0).keys)
            parts = (
                (part.step, part.last, keys[part.start : part.start + part.count])
                for part in loader.plan.slices()
            )
            self._walk_epoch(facts, epoch, parts)
        self.add(facts, ITEMS, digests=read_items(loader.dataset))

    def _walk_stream(self, loader: StreamLoader) -> None:
        identity, batches = loader.identity, loader._batches
        facts = LoaderFacts(
            identity.rank,
            identity.world_size,
            "run.loader",
            by_content=loader.sharded,
            batch_size=loader.batch_size,
            num_workers=loader.options.num_workers,
            drop_last=loader.drop_last,
            dataset=type(loader.dataset).__name__,
        )
        batches.source = source = _StreamKeys(
            batches.source.dataset, identity=identity, seed=loader.seed
        )
        source.by_content, batches.collate_fn = loader.sharded, list
        for epoch in range(EPOCHS):
            parts = (
                (micro.step, micro.last, micro.data[: micro.count])
                for micro in loader.micro_batches(epoch, 0)
            )
            self._walk_epoch(facts, epoch, parts)
        if not loader.sharded:  # all ranks read the same items
            source.set_epoch(0)
            first = [key for _, key in islice(source.stream(), COMPARED_ITEMS)]
            self.add(facts, ITEMS, digests=first)

    def _walk_epoch(
        self, facts: LoaderFacts, epoch: int, parts: Iterable[tuple[int, bool, Any]]
    ) -> None:
        """Record the samples of an epoch. Each part is a micro-step: the number of its step,
        whether it is the last one of it, and the keys of its samples.
        """
        self.add(facts, TRAINED)
        keys: list[int | str] = []
        for step, is_last, more in parts:
            keys += map(to_key, more)
            if is_last:
                self.add(facts, BATCH, epoch=epoch, step=step, keys=keys)
                keys = []
            if is_last and step + 1 == self.limit:
                return
        self.add(facts, EPOCH_END, epoch=epoch)

    # -- torch's own DataLoaders

    def watch_dataloaders(self) -> None:
        """Watch all DataLoaders that the script iterates. Those that look alike count as one: a
        script may make its loader anew in each epoch.
        """
        wrap(dataloader._BaseDataLoaderIter, "_next_index", note_asked)
        wrap(DataLoader, "__iter__", self._begin_pass)
        for name in ("backward", "grad"):
            wrap(torch.autograd, name, self._count_backward)

    def _count_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._backwards += 1
        return original(*args, **kwargs)

    def _begin_pass(self, original: Any, loader: DataLoader[Any]) -> Any:
        parts = (type(loader.batch_sampler), type(loader.dataset))
        if any(part.__module__.startswith("paceline.") for part in parts):
            return original(loader)  # a part of run.loader or run.evaluate
        facts = _describe(loader)
        if facts not in self._files:
            self.add(facts, ITEMS, digests=[] if facts.by_content else read_items(loader.dataset))
        if self._passes[facts] == EPOCHS:
            if self._is_judged(facts):
                self.end_process()
            return original(loader)
        if loader._iterator is not None:  # its workers persist: forget what a broken pass asked for
            loader._iterator._paceline_asked.clear()  # type: ignore[attr-defined]
        collate_fn = loader.collate_fn
        if facts.by_content:
            loader.collate_fn = _DigestingCollate(loader)
        batches = original(loader)
        loader.collate_fn = collate_fn
        return self._record_pass(facts, batches)

    def _record_pass(self, facts: LoaderFacts, batches: Any) -> Iterator[Any]:
        """Yield the batches of a pass, and record each when the script asks for the next one: a
        look at the first batch is none.
        """
        epoch = self._passes[facts]
        for step, found in enumerate(batches):
            if facts.by_content:
                keys, batch = found
            else:
                asked, batch = batches._paceline_asked.popleft(), found
                keys = [to_key(key) for key in (asked if isinstance(asked, list) else [asked])]
            before = self._backwards
            yield batch
            self.add(facts, BATCH, epoch=epoch, step=step, keys=keys)
            self._passes[facts] = epoch + 1
            if self._backwards > before and facts not in self._trained:
                self._trained.add(facts)
                self.add(facts, TRAINED)
            if step + 1 == self.limit and self._is_judged(facts):
                return
        self.add(facts, EPOCH_END, epoch=epoch)

    def _is_judged(self, facts: LoaderFacts) -> bool:
        """Return whether the script trains with this loader: as long as none is known, the first
        one.
        """
        return facts in (self._trained or list(self._files)[:1])


def _describe(loader: DataLoader[Any]) -> LoaderFacts:
    identity, batches = read_identity(), loader.batch_sampler
    # what decides the order: the sampler, or a batch sampler of the script's own
    sampler = loader.sampler if batches is None or type(batches) is BatchSampler else batches
    is_stream = isinstance(loader.dataset, IterableDataset)
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        name = "DistributedSampler"
    elif getattr(sampler, "replacement", False):
        name += " with replacement"
    return LoaderFacts(
        identity.rank,
        identity.world_size,
        "DataLoader",
        samples=None if is_stream else len(loader.dataset),  # type: ignore[arg-type]
        by_content=is_stream,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        shuffled=bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))),
        drop_last=loader.drop_last or bool(getattr(sampler, "drop_last", False)),
        dataset=type(loader.dataset).__name__,
        sampler="" if is_stream else name,
    )


class _DigestingCollate:
    """The collate function of a stream; it returns digests of the items, and the batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.collate_fn, self.is_batched = loader.collate_fn, loader.batch_size is not None

    def __call__(self, items: Any) -> tuple[list[str], Any]:
        digests = [digest(item) for item in (items if self.is_batched else [items])]
        return digests, self.collate_fn(items)


class _StreamKeys(ShardedIterable[str]):
    """A stream whose items are keys: what each holds, after its position if that is known."""

    by_content = False

    def stream(self, start: int = 0, *seeds: int) -> Iterator[tuple[int, str]]:
        for position, item in super().stream(start, *seeds):
            content = digest(item)
            yield position, content if self.by_content else f"{position}:{content[:4]}"


def read_items(dataset: Any) -> list[str | None]:
    """Return digests of the first items of a map-style dataset: None for one that differs when it
    is read again with the same random numbers.
    """
    digests: list[str | None] = []
    try:
        with preserve_host_rng():
            for index in range(min(COMPARED_ITEMS, len(dataset))):
                found = set()
                for _ in range(2):
                    seed_host(index)
                    found.add(digest(dataset[index]))
                digests.append(found.pop() if len(found) == 1 else None)
    except Exception:  # whatever the script's dataset raises: then its items are not known
        return []
    return digests


def to_key(key: Any) -> int | str:
    """Return a sample's key in a form that can be written."""
    try:
        return operator.index(key)  # also of NumPy and of a tensor
    except TypeError:
        return str(key)


def digest(item: Any) -> str:
    """Return a short digest of an item's contents."""
    state = hashlib.blake2b(digest_size=8)
    waiting = [item]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            state.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            thing = thing.detach().cpu().double().numpy()
        parts = parts_of(thing)
        if parts is not None:
            # the name of each part, too: a WebDataset sample names the file that it comes from
            for name in sorted(parts, key=str):
                waiting += [name, parts[name]]
        elif hasattr(thing, "tobytes"):  # an array or an image
            state.update(thing.tobytes())
        else:
            state.update(repr(thing).encode())
        state.update(b";")
    return state.hexdigest()


# -- also for `paceline prove`


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def note_asked(original: Any, batches: Any) -> Any:
    """Remember what a DataLoader asks its dataset for; with workers, it asks some batches ahead."""
    if not hasattr(batches, "_paceline_asked"):
        batches._paceline_asked = deque()
    found = original(batches)
    batches._paceline_asked.append(found)
    return found
