"""`make_loader`: the loader for any dataset. `MapLoader`: the one for map-style datasets, with a
global batch size, world-size invariance, and exact resume within an epoch.

`MapLoader` and `StreamLoader` share one interface: `micro_batches(epoch)`, `steps_per_epoch`,
`state_dict`, `load_state_dict` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.item_source import ItemSource, Source
from paceline.runtime.data.sample_assignment import EpochPlan, MicroBatch, check_not_in_steps
from paceline.runtime.data.sample_order import EpochOrder, Permutation, Sampled, check_same_order
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.tensor_source import TensorSource, count_samples, find_tensors
from paceline.runtime.data.workers import LoaderOptions
from paceline.runtime.distributed.identity import Identity, read_identity


def make_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    accumulate: int = 1,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    seed: int = 0,
    identity: Identity | None = None,
    device: torch.device | str | None = None,
    resident: bool = False,
    transform: Callable[..., Any] | None = None,
    sharded: bool = False,
    group: Any = None,
    **options: Any,
) -> MapLoader | StreamLoader:
    """Return a `MapLoader`, or a `StreamLoader` if the dataset is iterable-style.

    Map-style datasets are shuffled by default. A `sampler` decides the order instead, and a
    `batch_sampler` the global batches as well. `transform` is a function of the batches of a
    resident dataset. `sharded` means that an iterable already splits itself by rank and worker.
    Ranks use `group` to agree on the end of an iterable; a gloo group keeps the device out of it.
    Other options are those of `LoaderOptions`.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "run.loader() takes a dataset, but got a torch DataLoader.",
            hint="Pass the dataset itself: run.loader(dataset, batch_size=<global>, "
            "num_workers=...).",
        )
    _check_batches(batch_size, shuffle, drop_last, sampler, batch_sampler)
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        if sharded:
            raise UsageError(
                "sharded=True is for iterables that split themselves, but this dataset has "
                "__getitem__.",
                hint="Remove it: the loader splits the dataset.",
            )
        return MapLoader(
            dataset,
            batch_size=batch_size,
            accumulate=accumulate,
            shuffle=shuffle is not False,
            drop_last=drop_last is not False,
            sampler=sampler,
            batch_sampler=batch_sampler,
            seed=seed,
            identity=identity,
            device=device,
            group=group,
            resident=resident,
            transform=transform,
            **options,
        )
    _check_stream(
        dataset,
        {
            "shuffle": shuffle,
            "resident": resident,
            "transform": transform,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "persistent_workers": options.get("persistent_workers"),
            "augment_seeds": options.get("augment_seeds") is False,
        },
    )
    return StreamLoader(
        dataset,
        batch_size=batch_size or 0,
        accumulate=accumulate,
        drop_last=drop_last is not False,
        sharded=sharded,
        seed=seed,
        identity=identity,
        device=device,
        group=group,
        **options,
    )


def _check_batches(
    batch_size: int | None, shuffle: bool | None, drop_last: bool | None, sampler: Any, batches: Any
) -> None:
    """Check that one thing alone decides the order, and one the batches."""
    if batch_size is None and batches is None:
        raise UsageError(
            "run.loader() needs batch_size: the number of samples per step, over all ranks.",
            hint="If each item is a whole batch, use batch_size=run.world_size and "
            "collate_fn=lambda items: items[0].",
        )
    decides = "batch_sampler decides the batches"
    others: dict[str, Any] = {}
    if batches is not None:
        others = {
            "batch_size": batch_size,
            "sampler": sampler,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
    elif sampler is not None:
        decides = "sampler decides the order"
        others = {"shuffle": shuffle}
    for name, value in others.items():
        if value is not None and value is not False:
            raise UsageError(f"{decides}, so {name} has no meaning.", hint=f"Remove {name}.")


def _check_stream(dataset: Any, given: Mapping[str, Any]) -> None:
    """Reject options that have no meaning for a stream."""
    for name, value in given.items():
        if value:
            raise UsageError(
                f"{name} doesn't work with {type(dataset).__name__}: a stream decides its own "
                "order, its items always have seeds, and its workers restart for each pass.",
                hint=f"Remove {name}, or use a dataset with __len__ and __getitem__.",
            )


class MapLoader:
    """Batches of a map-style dataset, or of plain tensors.

    `batch_size` is global. So are the batches of a `batch_sampler`: each is one step, split between
    the ranks.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        seed: int = 0,
        identity: Identity | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        resident: bool = False,
        transform: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self.device = torch.device(device) if device is not None else None
        self.dataset, self.group, self.seed = dataset, group, seed
        self.options = LoaderOptions(**options)
        identity = identity if identity is not None else read_identity()
        if transform is not None and not resident:
            raise UsageError(
                "transform works on batches of a dataset that is on the device, so it needs "
                "resident=True.",
                hint="Pass resident=True, or transform the samples in the dataset.",
            )
        tensors = find_tensors(dataset) if self.options.collate_fn is None else None
        samples = len(dataset) if tensors is None else count_samples(tensors)
        chosen = sampler if batch_sampler is None else batch_sampler
        if not samples and (resident or chosen is None):
            raise UsageError(
                "The dataset of run.loader is empty.", hint="Check where its samples come from."
            )
        self.source: Source
        if resident or tensors is not None:
            self.source = TensorSource(
                dataset,
                self.options,
                device=self.device,
                resident=resident,
                transform=transform,
                seed=seed,
            )
        else:
            self.source = ItemSource(
                dataset, self.options, seed=seed, rank=identity.rank, device=self.device
            )
        self.shuffle = shuffle if chosen is None else None
        self.order: Permutation | Sampled = (
            Permutation(samples, shuffle=shuffle)
            if chosen is None
            else Sampled(chosen, in_batches=batch_sampler is not None, dataset=dataset)
        )
        first = self.order.draw(seed, 0) if chosen is not None else None
        self.plan = EpochPlan(
            samples if first is None else len(first.keys),
            batch_size,
            identity,
            accumulate,
            drop_last,
            None if first is None else first.sizes,
        )
        self.epoch = 0  # (epoch, step) is the position of the next batch
        self.step = 0
        self._digest: str | None = None  # of the sampler's order in this epoch
        # the position that was loaded, until `run.steps` uses it
        self._resumed: tuple[int, int] | None = None
        self._continues = False  # whether the next plain loop begins where a checkpoint was saved
        self._in_steps = False

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in an epoch, whatever the number of ranks and
        micro-steps.
        """
        return self.plan.steps

    @property
    def accumulate(self) -> int:
        return self.plan.accumulate

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None if a batch sampler decides it."""
        return self.plan.batch_size

    @property
    def saves_positions(self) -> bool:
        """Whether the state holds more than the epoch and the step, and so differs between
        ranks.
        """
        return False

    def first_step(self, epoch: int) -> int:
        """Return how many steps of this epoch are done."""
        return self._resumed[1] if self._resumed and self._resumed[0] == epoch else 0

    def forget_position(self) -> None:
        """Begin the next loop of `run.steps` at its first step: the position that was loaded is
        another loop's.
        """
        self._resumed = None

    def micro_batches(self, epoch: int, first_step: int | None = None) -> Iterator[MicroBatch]:
        """Yield one epoch from `first_step`, which defaults to the loaded position if that is in
        this epoch.

        A step counts as taken once its last micro-batch has been yielded: save between steps.
        """
        check_not_in_steps(self._in_steps)
        self._in_steps = in_steps = first_step is None
        if first_step is None:
            first_step, self._resumed = self.first_step(epoch), None
        try:
            order = self.draw_order(epoch, first_step)
            self.epoch, self.step = epoch, first_step
            if first_step >= self.steps_per_epoch:
                return
            world_size = self.plan.identity.world_size
            batches = self.source.batches(order, self.plan.slices(first_step), epoch)
            for part, data in zip(self.plan.slices(first_step), batches, strict=True):
                if part.last:
                    self.step = part.step + 1
                yield MicroBatch(
                    data,
                    part.count,
                    part.global_count,
                    part.index,
                    part.last,
                    part.step,
                    world_size,
                )
        finally:
            if in_steps:
                self._in_steps = False

    def draw_order(self, epoch: int, first_step: int) -> EpochOrder:
        """Return the samples of an epoch that begins or continues at a step."""
        samples = self.source.count_samples() if self.shuffle is not None else self.plan.samples
        if samples != self.plan.samples:
            raise UsageError(
                f"The dataset had {self.plan.samples} samples when run.loader got it, and now it "
                f"has {samples}.",
                hint="Create a loader for it as it is now: run.loader(dataset, ...).",
            )
        order = self.order.draw(self.seed, epoch)
        if not order.is_sampled:
            return order
        check_same_order(order, self.plan.identity, self.group)
        if first_step and epoch == self.epoch and self._digest not in (None, order.digest):
            raise CheckpointError(
                f"The sampler yields a different order for epoch {epoch} than before, so the "
                "loader can't continue at "
                f"step {first_step}.",
                hint="Let the order depend only on generators that are attributes of the sampler, "
                "on the global ones, "
                "or on the epoch that it gets by set_epoch(epoch). If it depends on anything "
                "else, restore that before "
                "the loop.",
            )
        self._digest = order.digest
        self.plan = replace(self.plan, samples=len(order.keys), sizes=order.sizes)
        return order

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, for a plain loop: once, after a resume, those that
        are left of it. It has no effect on `run.steps`.
        """
        epoch, first = self.epoch, self.step
        if first >= self.steps_per_epoch or (first and not self._continues):
            epoch, first = epoch + 1, 0
        self._continues = False
        for micro in self.micro_batches(epoch, first):
            yield micro.data

    def __len__(self) -> int:
        """Return the number of global batches, which is `steps_per_epoch`: what a schedule
        counts.
        """
        return self.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self.plan.samples,
            "shuffle": self.shuffle,
            "order": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. The number of ranks, micro-steps and workers may
        differ.
        """
        now = self.state_dict()
        # A sampler's order is compared as a whole when it is drawn.
        for name in ("batch_size", "shuffle", *(("samples",) if self.shuffle is not None else ())):
            if state["step"] and state[name] != now[name]:
                raise CheckpointError(
                    f"The checkpoint is in the middle of an epoch with {name}={state[name]}, "
                    f"but this loader has {name}={now[name]}.",
                    hint=f"Step {state['step']} of epoch {state['epoch']} would get different "
                    "samples. "
                    f"Resume with {name}={state[name]}, or start a new run from these weights.",
                )
        self.seed = int(state["seed"])
        self.source.seed = self.seed
        self.epoch, self.step, self._digest = (
            int(state["epoch"]),
            int(state["step"]),
            state["order"],
        )
        self._resumed, self._continues = (self.epoch, self.step), True

    def close(self) -> None:
        self.source.close()
