"""Evaluation that counts every sample once, with equally many forwards on every rank.

Each global batch is cut into slices whose sizes differ by one at most. When fewer samples are left than there
are ranks, a rank that has none gets a batch of 0 samples: tensors of the right shape whose first dimension
is 0. Forwarding it is harmless and keeps the collectives of DDP and FSDP2 in step, and sums over it add
nothing: `hits += (out.argmax(1) == y).sum(); seen += len(y)` is right as it stands. A mean over it is NaN:
add up sums, and divide once (`run.sum(hits) / run.sum(seen)`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.errors import UsageError
from paceline.runtime.data.batches import Place, evaluation_slices, evaluation_steps
from paceline.runtime.data.loader import ItemSource, Loader, Source
from paceline.runtime.data.resident import TensorSource, samples_in, tensors_of
from paceline.runtime.data.streams import StreamLoader
from paceline.runtime.data.transfer import trim
from paceline.runtime.distributed.identity import read_identity

DEFAULT_BATCH = 256


class Evaluation:
    """One pass over a map-style data set on every iteration; workers, if any, stay for the next one."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = DEFAULT_BATCH,
        identity: Place | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.place: Place = identity if identity is not None else read_identity()
        self.batch_size = batch_size
        target = torch.device(device) if device is not None else None
        tensors = None if collate_fn else tensors_of(dataset)
        self.source: Source
        if tensors is not None:
            self.samples = samples_in(tensors)
            self.source = TensorSource(tensors, device=target, resident=False)
        else:
            self.samples = len(dataset)
            self.source = ItemSource(
                dataset, seed=seed, device=target, num_workers=num_workers, collate_fn=collate_fn
            )

    def __len__(self) -> int:
        """Forwards of each rank."""
        return evaluation_steps(self.samples, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        slices = list(evaluation_slices(self.samples, self.batch_size, self.place))
        batches = self.source.batches(torch.arange(self.samples), iter(slices), 0)
        for each, data in zip(slices, batches, strict=True):
            yield data if each.count else trim(data, 0)

    def close(self) -> None:
        self.source.close()


class StreamEvaluation:
    """The same for an iterable data set: ranks go on until none has a sample left."""

    def __init__(self, dataset: Any, *, batch_size: int = DEFAULT_BATCH, **options: Any) -> None:
        self.loader = StreamLoader(dataset, batch_size=batch_size, drop_last=False, **options)

    def __iter__(self) -> Iterator[Any]:
        for micro in self.loader.micro_batches(0, 0):
            yield micro.data if micro.count else trim(micro.data, 0)

    def close(self) -> None:
        self.loader.close()


def evaluate(
    dataset: Any,
    *,
    batch_size: int | None = None,
    identity: Place | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    num_workers: int | None = None,
    group: Any = None,
) -> Evaluation | StreamEvaluation:
    """What to iterate over: batches of this rank, on the device. `batch_size` is global, as in `loader`.

    A `Loader` or a torch DataLoader stands for its data set, batch size, workers and collating; its order
    does not matter here.
    """
    collate_fn, sharded = None, False
    if isinstance(dataset, DataLoader):
        _check_whole(dataset)
        batch_size = batch_size or dataset.batch_size
        collate_fn = dataset.collate_fn
        num_workers = dataset.num_workers if num_workers is None else num_workers
        dataset = dataset.dataset
    elif isinstance(dataset, (Loader, StreamLoader)):
        batch_size = batch_size or dataset.batch_size
        sharded = isinstance(dataset, StreamLoader) and dataset.sharded
        dataset = dataset.dataset
    size = batch_size or DEFAULT_BATCH
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        world_size = (identity if identity is not None else read_identity()).world_size
        return StreamEvaluation(
            dataset, batch_size=max(1, size // world_size) * world_size, identity=identity, device=device, seed=seed,
            num_workers=num_workers or 0, group=group, collate_fn=collate_fn, sharded=sharded,
        )  # fmt: skip
    return Evaluation(
        dataset, batch_size=size, identity=identity, device=device, seed=seed,
        num_workers=num_workers or 0, collate_fn=collate_fn,
    )  # fmt: skip


def _check_whole(loader: DataLoader[Any]) -> None:
    """Only samplers that stand for the whole data set can be left aside."""
    if isinstance(loader.dataset, IterableDataset):
        return
    if not isinstance(loader.sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        raise UsageError(
            f"evaluate() cannot cut a DataLoader whose sampler is {type(loader.sampler).__name__}",
            hint="Give it the data set, or torch.utils.data.Subset(dataset, indices) for a part of it.",
        )
