"""`make_loader`: the loader for any dataset. `MapLoader`: the one for map-style datasets, with a
global batch size, world-size invariance, and exact resume within an epoch.

`MapLoader` and `StreamLoader` share one interface, that of `EpochLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.epoch_loader import EpochLoader
from paceline.runtime.data.item_source import ItemSource, Source
from paceline.runtime.data.sample_assignment import EpochPlan, MicroBatch
from paceline.runtime.data.sample_order import EpochOrder, Permutation, Sampled, check_same_order
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.tensor_source import TensorSource, count_samples, find_tensors


def make_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    resident: bool = False,
    transform: Callable[..., Any] | None = None,
    sharded: bool = False,
    **options: Any,
) -> MapLoader | StreamLoader:
    """Return a `MapLoader`, or a `StreamLoader` if the dataset is iterable-style.

    Map-style datasets are shuffled by default. A `sampler` decides the order instead, and a
    `batch_sampler` the global batches as well. `transform` is a function of the batches of a
    resident dataset. `sharded` means that an iterable already splits itself by rank and worker.
    Other options are those of `EpochLoader` and `LoaderOptions`. Ranks use `group` to agree on the
    end of an iterable; a gloo group keeps the device out of it.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "run.loader() takes a dataset, but got a torch DataLoader.",
            hint="Pass the dataset itself: run.loader(dataset, batch_size=<global>, "
            "num_workers=...).",
        )
    _check_batches(batch_size, shuffle, drop_last, sampler, batch_sampler)
    options |= {"batch_size": batch_size, "drop_last": drop_last is not False}
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        if sharded:
            raise UsageError(
                "sharded=True is for iterables that split themselves, but this dataset has "
                "__getitem__.",
                hint="Remove it: the loader splits the dataset.",
            )
        return MapLoader(
            dataset,
            shuffle=shuffle is not False,
            sampler=sampler,
            batch_sampler=batch_sampler,
            resident=resident,
            transform=transform,
            **options,
        )
    without_meaning = {
        "shuffle": shuffle,
        "resident": resident,
        "transform": transform,
        "sampler": sampler,
        "batch_sampler": batch_sampler,
        "persistent_workers": options.get("persistent_workers"),
    }
    for name, value in without_meaning.items():
        if value:
            raise UsageError(
                f"{name} doesn't work with {type(dataset).__name__}: a stream decides its own "
                "order, and its workers restart for each pass.",
                hint=f"Remove {name}, or use a dataset with __len__ and __getitem__.",
            )
    return StreamLoader(dataset, sharded=sharded, **options)


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


class MapLoader(EpochLoader):
    """Batches of a map-style dataset, or of plain tensors.

    `batch_size` is global. So are the batches of a `batch_sampler`: each is one step, split between
    the ranks.
    """

    # streams may have more state than the epoch and the step, which differs between ranks
    saves_positions = False

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        resident: bool = False,
        transform: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
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
                seed=self.seed,
            )
        else:
            self.source = ItemSource(
                dataset, self.options, seed=self.seed, rank=self.identity.rank, device=self.device
            )
        self.shuffle = shuffle if chosen is None else None
        self.order: Permutation | Sampled = Permutation(samples, shuffle=shuffle)
        sizes = None
        if chosen is not None:
            self.order = Sampled(chosen, in_batches=batch_sampler is not None, dataset=dataset)
            first = self.order.draw(self.seed, 0)
            samples, sizes = len(first.keys), first.sizes
        self.plan = EpochPlan(
            samples, self.batch_size, self.identity, self.accumulate, self.drop_last, sizes
        )
        self._digest: str | None = None  # of the sampler's order in this epoch

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """The number of optimizer steps in an epoch, whatever the number of ranks and
        micro-steps.
        """
        return self.plan.steps

    def __len__(self) -> int:
        """Return the number of global batches, which is `steps_per_epoch`: what a schedule
        counts.
        """
        return self.steps_per_epoch

    def _read(
        self, epoch: int, first_step: int, position: Mapping[str, Any]
    ) -> Iterator[MicroBatch]:
        order = self.draw_order(epoch, first_step)
        self._begin(epoch, first_step)
        if first_step >= self.steps_per_epoch:
            return
        world_size = self.identity.world_size
        batches = self.source.batches(order, self.plan.slices(first_step), epoch)
        for part, data in zip(self.plan.slices(first_step), batches, strict=True):
            if part.last:
                self.step = part.step + 1
            yield MicroBatch(
                data, part.count, part.global_count, part.index, part.last, part.step, world_size
            )

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
        check_same_order(order, self.identity, self.group)
        if first_step and epoch == self.epoch and self._digest not in (None, order.digest):
            raise CheckpointError(
                f"The sampler yields a different order for epoch {epoch} than before, so the "
                f"loader can't continue at step {first_step}.",
                hint="Let the order depend only on generators that are attributes of the sampler, "
                "on the global ones, or on the epoch that it gets by set_epoch(epoch). If it "
                "depends on anything else, restore that before the loop.",
            )
        self._digest = order.digest
        self.plan = replace(self.plan, samples=len(order.keys), sizes=order.sizes)
        return order

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
                    f"samples. Resume with {name}={state[name]}, or start a new run from these "
                    "weights.",
                )
        self.seed = self.source.seed = int(state["seed"])
        self._digest = state["order"]
        self._load_position(state)

    def close(self) -> None:
        self.source.close()
