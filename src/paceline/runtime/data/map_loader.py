"""The loader for map-style datasets: global batch size, world-size invariance, exact resume within
an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.early_pass import EarlyPass
from paceline.runtime.data.item_source import ItemOptions, ItemSource, Source
from paceline.runtime.data.resident.tensor_source import (
    TensorSource,
    count_samples,
    find_tensors,
    materialize,
)
from paceline.runtime.data.sample_assignment import EpochPlan, MicroBatch, check_not_in_steps
from paceline.runtime.data.sample_order import EpochOrder, Permutation, Sampled, check_same_order
from paceline.runtime.distributed.identity import Identity, read_identity

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        num_workers: int = 0,
        **items: Unpack[ItemOptions],
    ) -> None:
        self.device = torch.device(device) if device is not None else None
        self.dataset, self.group = dataset, group
        self.seed, self.num_workers, self.items = seed, num_workers, items
        if transform is not None and not resident:
            raise UsageError(
                "transform works on batches of a dataset that is on the device, so it needs "
                "resident=True.",
                hint="Pass resident=True, or transform the samples in the dataset.",
            )
        tensors = None if items.get("collate_fn") else find_tensors(dataset)
        if resident and tensors is None and len(dataset):
            tensors = materialize(dataset, seed=seed, num_workers=num_workers, options=items)
        self.source: Source
        if tensors is not None:
            samples = count_samples(tensors)
            self.source = TensorSource(
                tensors, device=self.device, resident=resident, transform=transform, seed=seed
            )
        else:
            samples = len(dataset)
            self.source = ItemSource(
                dataset, seed=seed, device=self.device, num_workers=num_workers, **items
            )
        if not samples and (resident or (sampler is None and batch_sampler is None)):
            raise UsageError(
                "The dataset of run.loader is empty.", hint="Check where its samples come from."
            )
        identity = identity if identity is not None else read_identity()
        chosen = sampler if batch_sampler is None else batch_sampler
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
        self._in_steps = False
        self.early = EarlyPass(dataset)

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
            order = self._draw_order(epoch, first_step)
            self.epoch, self.step = epoch, first_step
            if first_step >= self.steps_per_epoch:
                return
            world_size = self.plan.identity.world_size
            batches = self.early.take((epoch, first_step, self.seed), self.source.close)
            if batches is None:
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

    def begin_early(self, epoch: int) -> None:
        """Let the workers begin with what the next loop of `run.steps` will ask for, if it is this
        epoch.

        A sampler is not asked before the loop: its order may depend on what the script does until
        then.
        """
        source, order, first = self.source, self.order, self.first_step(epoch)
        if (
            not isinstance(source, ItemSource)
            or not isinstance(order, Permutation)
            or not source.num_workers
        ):
            return
        position = (epoch, first, self.seed)
        if self.early.has_begun(position):
            return
        if self.early.discard():
            source.close()
        if first < self.steps_per_epoch and not source.is_running:
            self.early.begin(
                position,
                lambda: source.batches(
                    order.draw(self.seed, epoch), self.plan.slices(first), epoch
                ),
            )

    def _draw_order(self, epoch: int, first_step: int) -> EpochOrder:
        if isinstance(self.source, ItemSource) and self.shuffle is not None:
            self._check_length(len(self.dataset))
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

    def _check_length(self, samples: int) -> None:
        if samples != self.plan.samples:
            raise UsageError(
                f"The dataset had {self.plan.samples} samples when run.loader got it, and now it "
                f"has {samples}.",
                hint="Create a loader for it as it is now: run.loader(dataset, ...).",
            )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the current position on, for a plain loop. It has no effect on
        `run.steps`.
        """
        epoch, first = self.epoch, self.step if self.step < self.steps_per_epoch else 0
        if self.step >= self.steps_per_epoch:
            epoch += 1
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
        self.source.reseed(self.seed)
        self.epoch, self.step, self._digest = (
            int(state["epoch"]),
            int(state["step"]),
            state["order"],
        )
        self._resumed = (self.epoch, self.step)

    def close(self) -> None:
        self.early.discard()
        self.source.close()
