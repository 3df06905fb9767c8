"""Evaluation loaders: every sample counts once, and every rank runs the same number of forward
passes.

Each global batch is split into slices whose sizes differ by at most one. Batches of a batch
sampler, and items that are whole batches, go to the ranks in turn. If a rank has nothing left, it
gets a batch of 0 samples: a forward pass over it is harmless and keeps the collectives of DDP and
FSDP2 in step. Sums over it add nothing, so
`hits += (out.argmax(1) == y).sum(); seen += len(y)` is correct. A mean over it is NaN: add up sums
and divide once (`run.sum(hits) / run.sum(seen)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from paceline.errors import UsageError
from paceline.runtime.data.empty_batch import BatchCollate
from paceline.runtime.data.item_source import ItemSource, Source
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.data.sample_assignment import Slice, evaluation_rounds, evaluation_slices
from paceline.runtime.data.sample_order import EpochOrder, Permutation, Sampled, check_same_order
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.tensor_source import TensorSource, find_tensors
from paceline.runtime.data.transfer import map_tensors
from paceline.runtime.data.workers import LoaderOptions
from paceline.runtime.distributed.identity import Identity, read_identity

DEFAULT_BATCH_SIZE = 256


@dataclass
class EvaluationData:
    """What is evaluated, and how it is loaded: taken from a dataset, a DataLoader or a loader of
    `run.loader`.
    """

    dataset: Any
    # None: the items are whole batches, or a batch sampler makes them
    batch_size: int | None = DEFAULT_BATCH_SIZE
    options: LoaderOptions = field(default_factory=LoaderOptions)
    order: Sampled | None = None  # of a sampler or a batch sampler; None: the whole dataset
    sharded: bool = False

    @property
    def collate(self) -> BatchCollate:
        if self.batch_size is None and not (self.order and self.order.in_batches):
            return BatchCollate(self.options.collate_fn or default_convert, takes_one=True)
        return BatchCollate(self.options.collate_fn or default_collate)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")


class MapEvaluationLoader:
    """Batches of a map-style dataset, one pass per iteration."""

    def __init__(
        self,
        data: EvaluationData,
        *,
        identity: Identity,
        device: torch.device | None = None,
        seed: int = 0,
        group: Any = None,
    ) -> None:
        self.data, self.identity, self.seed, self.group = data, identity, seed, group
        is_plain = data.options.collate_fn in (None, default_collate)
        options = replace(data.options, collate_fn=data.collate)
        self.source: Source
        if is_plain and data.batch_size is not None and find_tensors(data.dataset) is not None:
            self.source = TensorSource(data.dataset, options, device=device)
        else:
            self.source = ItemSource(
                data.dataset, options, seed=seed, rank=identity.rank, device=device
            )

    def count_batches(self) -> int:
        """Return the number of forward passes of each rank."""
        return len(self._slices(self._draw_order()))

    def _draw_order(self) -> EpochOrder:
        """Return the samples of the next pass: a dataset may have grown since the last one."""
        order = self.data.order or Permutation(self.source.count_samples(), shuffle=False)
        return order.draw(self.seed, 0)

    def __iter__(self) -> Iterator[Any]:
        order = self._draw_order()
        check_same_order(order, self.identity, self.group)
        slices = self._slices(order)
        if not slices:
            return
        batches = self.source.batches(order, iter(slices), 0)
        in_tensors = isinstance(self.source, TensorSource)
        for part, batch in zip(slices, batches, strict=True):
            yield batch if part.count or not in_tensors else map_tensors(batch, _without_rows)

    def _slices(self, order: EpochOrder) -> list[Slice]:
        if order.sizes is not None:
            return list(evaluation_rounds(order.sizes, self.identity))
        if self.data.batch_size is None:
            return list(evaluation_rounds([1] * len(order.keys), self.identity))
        return list(evaluation_slices(len(order.keys), self.data.batch_size, self.identity))

    def close(self) -> None:
        self.source.close()


class StreamEvaluationLoader:
    """Batches of an iterable dataset. Every rank continues until no rank has a sample left."""

    def __init__(self, data: EvaluationData, *, identity: Identity, **options: Any) -> None:
        per_rank = 1 if data.batch_size is None else max(1, data.batch_size // identity.world_size)
        self.loader = StreamLoader(
            data.dataset,
            batch_size=per_rank * identity.world_size,
            drop_last=False,
            identity=identity,
            sharded=data.sharded,
            **{**vars(data.options), "collate_fn": data.collate},
            **options,
        )

    def count_batches(self) -> None:
        """A stream has no length."""

    def __iter__(self) -> Iterator[Any]:
        for micro in self.loader.micro_batches(0, 0):
            yield micro.data

    def close(self) -> None:
        self.loader.close()


def make_evaluation_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    identity: Identity | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    num_workers: int | None = None,
    group: Any = None,
) -> MapEvaluationLoader | StreamEvaluationLoader:
    """Return a loader of this rank's batches, on the device. `batch_size` is global, as in
    `make_loader`.

    A torch DataLoader keeps its samples, batches, workers and collation, but is not shuffled and
    drops nothing. So does a loader of `run.loader`.
    """
    data = _read(dataset, num_workers)
    if batch_size is not None and data.batch_size is None:
        raise UsageError(
            "run.evaluate() got a batch_size, but the DataLoader's batch_sampler or dataset "
            "decides the batches.",
            hint="Remove batch_size, or pass the dataset itself.",
        )
    if batch_size is not None:
        data.batch_size = batch_size
    identity = identity if identity is not None else read_identity()
    target = torch.device(device) if device is not None else None
    kind = StreamEvaluationLoader if data.is_stream else MapEvaluationLoader
    return kind(data, identity=identity, device=target, seed=seed, group=group)


def _read(source: Any, num_workers: int | None) -> EvaluationData:
    if isinstance(source, DataLoader):
        data = _read_dataloader(source)
    elif isinstance(source, StreamLoader):
        data = EvaluationData(
            source.dataset, source.batch_size, source.options, sharded=source.sharded
        )
    elif isinstance(source, MapLoader):
        order = source.order if isinstance(source.order, Sampled) else None
        data = EvaluationData(source.dataset, source.batch_size, source.options, order)
    else:
        data = EvaluationData(source)
    workers = data.options.num_workers if num_workers is None else num_workers
    # Of torch's options, those for workers are errors without any.
    if not workers:
        data.options = LoaderOptions(
            collate_fn=data.options.collate_fn, pin_memory=data.options.pin_memory
        )
    data.options = replace(data.options, num_workers=workers, persistent_workers=False)
    return data


def _read_dataloader(loader: DataLoader[Any]) -> EvaluationData:
    options = LoaderOptions(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or None,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    data = EvaluationData(loader.dataset, loader.batch_size, options)
    if data.is_stream:
        return data
    makes_batches = loader.batch_size is None and loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if makes_batches else loader.sampler
    if not _covers_all(sampler, loader.dataset):
        data.order = Sampled(sampler, in_batches=makes_batches, dataset=loader.dataset)
    return data


def _covers_all(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler yields the whole dataset, in whatever order. One per rank does so
    together.
    """
    if isinstance(sampler, DistributedSampler):
        return True
    once = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement
    )
    return once and len(sampler) == len(dataset)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0]
