"""The training loader: a global batch size, the same samples at every world size, exact resume within an epoch.

`make_loader` is the one door: map-style data sets, plain tensors and iterables come out with the same surface:
`micro_batches(epoch)`, `steps_per_epoch`, `state_dict`, `load_state_dict`, `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.batches import Cut, Place, Slice, epoch_order
from paceline.runtime.data.randomness import Seeded, host_randomness_kept, mix
from paceline.runtime.data.resident import TensorSource, materialised, samples_in, tensors_of
from paceline.runtime.data.transfer import feed
from paceline.runtime.data.workers import Crew, WorkerInit
from paceline.runtime.distributed.identity import read_identity

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.runtime.data.streams import StreamLoader


@dataclass(slots=True, eq=False)
class Micro:
    """One rank's part of one micro-step, on the device."""

    data: Any
    count: int  # true samples in `data`; 0 when it only repeats one so that all ranks keep step
    global_count: int  # true samples of the whole step: all ranks, all micro-steps
    index: int  # which micro-step of its step
    last: bool  # the optimizer moves after this one
    step: int  # which step of the epoch
    world_size: int

    @property
    def mean_scale(self) -> float:
        """What a mean over this slice is multiplied by, so that gradients averaged over ranks are the true mean.

        In a full batch that is 1 / accumulate; in a tail each slice weighs what it holds.
        """
        return self.count * self.world_size / self.global_count

    @property
    def sum_scale(self) -> float:
        """The same for a sum over this slice."""
        return self.world_size / self.global_count if self.count else 0.0


class Source(Protocol):
    """Where the batches of slices come from."""

    def batches(self, order: torch.Tensor, slices: Iterator[Slice], epoch: int) -> Iterator[Any]: ...

    def close(self) -> None: ...


class _Keys:
    """A batch sampler whose plan is laid down anew for each epoch: persistent workers need no new loader."""

    def __init__(self) -> None:
        self.plan: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.plan


class ItemOptions(TypedDict, total=False):
    """What `ItemSource` passes to torch's DataLoader, and `augment_seeds`."""

    augment_seeds: bool
    """Seed each item from (seed, epoch, index). Off: a little faster, and augmentation depends on the workers."""
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool | None
    persistent_workers: bool | None
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float


class ItemSource:
    """Batches of items that a data set computes, in this process or in workers."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        device: torch.device | None = None,
        num_workers: int = 0,
        augment_seeds: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
    ) -> None:
        self.seed = seed
        self.device = device
        self.num_workers = num_workers
        self.seeded: Seeded[Any] | None = Seeded(dataset, seed) if augment_seeds else None
        self._keys = _Keys()
        # Its own generator: otherwise each epoch's start would draw from the one that the model uses.
        self._generator = torch.Generator()
        on_cuda = device is not None and device.type == "cuda"
        self.loader: DataLoader[Any] = DataLoader(
            self.seeded or dataset,
            batch_sampler=self._keys,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=on_cuda if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerInit(worker_init_fn) if num_workers else None,
            generator=self._generator,
            timeout=timeout,
        )
        self._crew = Crew(self)

    def batches(self, order: torch.Tensor, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        self._keys.plan = _plan(order, slices, epoch if self.seeded is not None else None)
        self._generator.manual_seed(mix(self.seed, epoch, -1))
        iterator = iter(self.loader)
        self._crew.engage(iterator)
        here = self.num_workers == 0 and self.seeded is not None
        return feed(_undisturbed(iterator) if here else iterator, self.device)

    def reseed(self, seed: int) -> None:
        if seed != self.seed:
            self.close()  # workers that already run hold the old one
            self.seed = seed
            if self.seeded is not None:
                self.seeded.seed = seed

    def close(self) -> None:
        """End the workers now."""
        self._crew.dismiss()
        self.loader._iterator = None


def _plan(order: torch.Tensor, slices: Iterator[Slice], epoch: int | None) -> Iterator[list[Any]]:
    for each in slices:
        rows = order[each.start : each.stop].tolist()
        yield rows if epoch is None else [(epoch, row) for row in rows]


def _undisturbed(batches: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while True:
        with host_randomness_kept():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


class Loader:
    """Batches of a map-style data set, or of plain tensors. `batch_size` is global."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int = 0,
        identity: Place | None = None,
        device: torch.device | str | None = None,
        resident: bool = False,
        num_workers: int = 0,
        **items: Unpack[ItemOptions],
    ) -> None:
        place: Place = identity if identity is not None else read_identity()
        self.device = torch.device(device) if device is not None else None
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        tensors = None if items.get("collate_fn") else tensors_of(dataset)
        if resident and tensors is None:
            tensors = materialised(dataset, seed=seed, num_workers=num_workers)
        self.source: Source
        if tensors is not None:
            samples = samples_in(tensors)
            self.source = TensorSource(tensors, device=self.device, resident=resident)
        else:
            samples = len(dataset)
            self.source = ItemSource(dataset, seed=seed, device=self.device, num_workers=num_workers, **items)
        self.cut = Cut(samples, batch_size, place, accumulate, drop_last)
        self.epoch = 0  # where the next batch stands: everything before (epoch, step) has been handed out
        self.step = 0
        self._resumed: tuple[int, int] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.cut.steps

    @property
    def accumulate(self) -> int:
        return self.cut.accumulate

    @property
    def batch_size(self) -> int:
        return self.cut.batch_size

    def micro_batches(self, epoch: int, first_step: int | None = None) -> Iterator[Micro]:
        """One epoch from a step on; by default from where a loaded state stood, if that was in this epoch.

        A step counts as taken once its last micro-batch has been handed out: save between steps.
        """
        if first_step is None:
            first_step = self._resumed[1] if self._resumed and self._resumed[0] == epoch else 0
        self._resumed = None
        self.epoch, self.step = epoch, first_step
        order = epoch_order(self.cut.samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        world_size = self.cut.place.world_size
        slices = self.cut.slices(first_step)
        if first_step >= self.steps_per_epoch:
            return
        batches = self.source.batches(order, self.cut.slices(first_step), epoch)
        for each, data in zip(slices, batches, strict=True):
            if each.last:
                self.step = each.step + 1
            yield Micro(data, each.count, each.global_count, each.index, each.last, each.step, world_size)

    def __iter__(self) -> Iterator[Any]:
        """For a plain loop: the batches of one epoch, then of the next."""
        epoch, first = self.epoch, self.step if self.step < self.steps_per_epoch else 0
        if self.step >= self.steps_per_epoch:
            epoch += 1
        for micro in self.micro_batches(epoch, first):
            yield micro.data

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self.cut.samples,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position. The number of ranks, micro-steps and workers may be another one."""
        now = self.state_dict()
        for name in ("batch_size", "samples", "shuffle"):
            if state["step"] and state[name] != now[name]:
                raise CheckpointError(
                    f"the checkpoint stands in the midst of an epoch with {name}={state[name]}; now it is {now[name]}",
                    hint=f"Step {state['step']} of epoch {state['epoch']} would be other samples. "
                    f"Resume with {name}={state[name]}, or start a new run from these weights.",
                )
        self.seed = int(state["seed"])
        if isinstance(self.source, ItemSource):
            self.source.reseed(self.seed)
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self._resumed = (self.epoch, self.step)

    def close(self) -> None:
        self.source.close()


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    accumulate: int = 1,
    shuffle: bool | None = None,
    drop_last: bool = True,
    seed: int = 0,
    identity: Place | None = None,
    device: torch.device | str | None = None,
    resident: bool = False,
    sharded: bool = False,
    group: Any = None,
    num_workers: int = 0,
    **items: Unpack[ItemOptions],
) -> Loader | StreamLoader:
    """The loader that fits a data set: `Loader`, or `StreamLoader` for an iterable.

    `shuffle` is on by default where there is an order to choose. `sharded` says that an iterable cuts itself
    by rank and worker; `group` is where ranks agree on an iterable's end (a gloo group keeps the device out).
    """
    from paceline.runtime.data.streams import StreamLoader

    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a loader is made from a data set, and a torch DataLoader was given",
            hint="Give the data set: run.loader(dataset, batch_size=<global>, num_workers=...).",
        )
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        return Loader(
            dataset, batch_size=batch_size, accumulate=accumulate, shuffle=shuffle is not False,
            drop_last=drop_last, seed=seed, identity=identity, device=device, resident=resident,
            num_workers=num_workers, **items,
        )  # fmt: skip
    for name, asked in (("shuffle", bool(shuffle)), ("resident", resident)):
        if asked:
            raise UsageError(
                f"{name}=True, but {type(dataset).__name__} is a stream, whose order is its own",
                hint=f"Leave {name} out, or give a data set with __len__ and __getitem__.",
            )
    return StreamLoader(
        dataset, batch_size=batch_size, accumulate=accumulate, drop_last=drop_last, sharded=sharded, seed=seed,
        identity=identity, device=device, group=group, num_workers=num_workers,
        collate_fn=items.get("collate_fn"), prefetch_factor=items.get("prefetch_factor"),
        worker_init_fn=items.get("worker_init_fn"),
    )  # fmt: skip
