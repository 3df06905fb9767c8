"""Evaluation loaders: every sample counts once, and every rank runs the same number of forward passes.

Each global batch is split into slices whose sizes differ by at most one. When fewer samples are left than there are
ranks, some ranks get a batch of 0 samples: tensors of the right shape whose first dimension is 0. A forward pass over
it is harmless and keeps the collectives of DDP and FSDP2 in step. Sums over it add nothing, so
`hits += (out.argmax(1) == y).sum(); seen += len(y)` is correct. A mean over it is NaN: add up sums and divide once
(`run.sum(hits) / run.sum(seen)`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from paceline.errors import UsageError
from paceline.runtime.data.item_source import ItemSource, Source
from paceline.runtime.data.map_loader import MapLoader
from paceline.runtime.data.resident import TensorSource, count_samples, find_tensors
from paceline.runtime.data.sample_assignment import evaluation_slices, evaluation_steps
from paceline.runtime.data.streams.stream_loader import StreamLoader
from paceline.runtime.data.transfer import trim
from paceline.runtime.distributed.identity import Identity, read_identity

DEFAULT_BATCH_SIZE = 256


class MapEvaluationLoader:
    """Batches of a map-style data set, one pass per iteration. Workers stay alive for the next pass."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        identity: Identity | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.identity = identity if identity is not None else read_identity()
        self.batch_size = batch_size
        target = torch.device(device) if device is not None else None
        tensors = None if collate_fn else find_tensors(dataset)
        self.source: Source
        if tensors is not None:
            self.samples = count_samples(tensors)
            self.source = TensorSource(tensors, device=target, resident=False)
        else:
            self.samples = len(dataset)
            self.source = ItemSource(dataset, seed=seed, device=target, num_workers=num_workers, collate_fn=collate_fn)

    def __len__(self) -> int:
        """Return the number of forward passes of each rank."""
        return evaluation_steps(self.samples, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        slices = list(evaluation_slices(self.samples, self.batch_size, self.identity))
        batches = self.source.batches(torch.arange(self.samples), iter(slices), 0)
        for part, data in zip(slices, batches, strict=True):
            yield data if part.count else trim(data, 0)

    def close(self) -> None:
        self.source.close()


class StreamEvaluationLoader:
    """Batches of an iterable data set. Every rank continues until no rank has a sample left."""

    def __init__(self, dataset: Any, *, batch_size: int = DEFAULT_BATCH_SIZE, **options: Any) -> None:
        self.loader = StreamLoader(dataset, batch_size=batch_size, drop_last=False, **options)

    def __iter__(self) -> Iterator[Any]:
        for micro in self.loader.micro_batches(0, 0):
            yield micro.data if micro.count else trim(micro.data, 0)

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
    """Return a loader of this rank's batches, on the device. `batch_size` is global, as in `make_loader`.

    From a Paceline loader or a torch DataLoader it takes the data set, batch size, workers and collation, but not
    the order.
    """
    collate_fn, sharded = None, False
    if isinstance(dataset, DataLoader):
        _check_sampler(dataset)
        batch_size = batch_size or dataset.batch_size
        collate_fn = dataset.collate_fn
        num_workers = dataset.num_workers if num_workers is None else num_workers
        dataset = dataset.dataset
    elif isinstance(dataset, (MapLoader, StreamLoader)):
        batch_size = batch_size or dataset.batch_size
        sharded = isinstance(dataset, StreamLoader) and dataset.sharded
        dataset = dataset.dataset
    size = batch_size or DEFAULT_BATCH_SIZE
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        world_size = (identity if identity is not None else read_identity()).world_size
        return StreamEvaluationLoader(
            dataset, batch_size=max(1, size // world_size) * world_size, identity=identity, device=device, seed=seed,
            num_workers=num_workers or 0, group=group, collate_fn=collate_fn, sharded=sharded,
        )  # fmt: skip
    return MapEvaluationLoader(
        dataset, batch_size=size, identity=identity, device=device, seed=seed,
        num_workers=num_workers or 0, collate_fn=collate_fn,
    )  # fmt: skip


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Reject a sampler that may select only a part of the data set."""
    if isinstance(loader.dataset, IterableDataset):
        return
    if not isinstance(loader.sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        raise UsageError(
            f"run.evaluate() can't split a DataLoader whose sampler is {type(loader.sampler).__name__}.",
            hint="Pass the data set itself, or torch.utils.data.Subset(dataset, indices) for a part of it.",
        )
