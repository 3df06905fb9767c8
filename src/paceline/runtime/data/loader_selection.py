"""`make_loader`: the right loader for any dataset.

`MapLoader` and `StreamLoader` share one interface: `micro_batches(epoch)`, `steps_per_epoch`,
`state_dict`,
`load_state_dict` and `close`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.runtime.data.item_source import ItemOptions
from paceline.runtime.data.map_loader import MapLoader
from paceline.runtime.data.streams.stream_loader import StreamLoader, StreamOptions
from paceline.runtime.distributed.identity import Identity

STREAM_OPTIONS = ("collate_fn", *StreamOptions.__annotations__)

# Options of torch's DataLoader that a loader can't have, with the reason and what to do.
REJECTED = {
    "generator": (
        "every epoch's order follows from the seed, so that all ranks and a resumed run get the "
        "same one",
        "Pass seed=generator.initial_seed() instead.",
    ),
    "in_order": ("a position in the epoch is only defined if batches come in order", "Remove it."),
    "pin_memory_device": ("the loader copies batches to run.device by itself", "Remove it."),
}


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
    num_workers: int = 0,
    **options: Any,
) -> MapLoader | StreamLoader:
    """Return a `MapLoader`, or a `StreamLoader` if the dataset is iterable-style.

    Map-style datasets are shuffled by default. A `sampler` decides the order instead, and a
    `batch_sampler` the global batches as well. `transform` is a function of the batches of a
    resident dataset. `sharded` means that an iterable already splits itself by rank and worker.
    Ranks use `group` to agree on the end of an iterable; a gloo group keeps the device out of it.
    Other options are those of `ItemOptions`.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "run.loader() takes a dataset, but got a torch DataLoader.",
            hint="Pass the dataset itself: run.loader(dataset, batch_size=<global>, "
            "num_workers=...).",
        )
    _check_names(options)
    _check_batches(
        batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        sampler=sampler,
        batch_sampler=batch_sampler,
    )
    drop_last = drop_last is not False
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
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            seed=seed,
            identity=identity,
            device=device,
            group=group,
            resident=resident,
            transform=transform,
            num_workers=num_workers,
            **cast(ItemOptions, options),
        )
    if transform is not None:
        raise UsageError(
            f"transform doesn't work with {type(dataset).__name__}: it is for datasets that are "
            "kept on the device.",
            hint="Transform the samples in the stream, or the batches in your loop.",
        )
    _check_stream(
        dataset,
        {
            "shuffle": shuffle,
            "resident": resident,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            **options,
        },
    )
    return StreamLoader(
        dataset,
        batch_size=batch_size or 0,
        accumulate=accumulate,
        drop_last=drop_last,
        sharded=sharded,
        seed=seed,
        identity=identity,
        device=device,
        group=group,
        num_workers=num_workers,
        **{name: options[name] for name in STREAM_OPTIONS if name in options},
    )


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in REJECTED:
            reason, hint = REJECTED[name]
            raise UsageError(f"run.loader() doesn't take {name}: {reason}.", hint=hint)
        if name not in ItemOptions.__annotations__:
            known = [*inspect.signature(make_loader).parameters, *ItemOptions.__annotations__]
            known = [each for each in known if each not in ("options", "identity", "group")]
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"Did you mean {nearest[0]}?" if nearest else f"Options are {', '.join(known[1:])}."
            )
            raise UsageError(f"run.loader() has no option {name!r}.", hint=hint)


def _check_batches(
    batch_size: int | None,
    *,
    shuffle: bool | None,
    drop_last: bool | None,
    sampler: Any,
    batch_sampler: Any,
) -> None:
    """Check that one thing alone decides the order, and one the batches."""
    if batch_size is None and batch_sampler is None:
        raise UsageError(
            "run.loader() needs batch_size: the number of samples per step, over all ranks.",
            hint="If each item is a whole batch, use batch_size=run.world_size and "
            "collate_fn=lambda items: items[0].",
        )
    others = {
        "batch_size": batch_size,
        "sampler": sampler,
        "shuffle": shuffle,
        "drop_last": drop_last,
    }
    if batch_sampler is not None:
        for name, value in others.items():
            if value is not None and value is not False:
                raise UsageError(
                    f"batch_sampler decides the batches, so {name} has no meaning.",
                    hint=f"Remove {name}.",
                )
    if sampler is not None and shuffle:
        raise UsageError(
            "sampler decides the order, so shuffle has no meaning.", hint="Remove shuffle."
        )


def _check_stream(dataset: Any, options: Mapping[str, Any]) -> None:
    """Reject options that have no meaning for a stream."""
    kind = type(dataset).__name__
    for name in ("shuffle", "resident", "sampler", "batch_sampler"):
        if options.get(name):
            value = "=True" if options[name] is True else ""
            raise UsageError(
                f"{name}{value} doesn't work with {kind}: a stream decides its own order.",
                hint=f"Remove {name}, or use a dataset with __len__ and __getitem__.",
            )
    if options.get("persistent_workers"):
        raise UsageError(
            f"persistent_workers doesn't work with {kind}: a stream's workers restart for each "
            "pass, at the position "
            "where that pass begins.",
            hint="Remove it.",
        )
    if options.get("augment_seeds") is False:
        raise UsageError(
            f"augment_seeds=False doesn't work with {kind}: the items of a stream always have "
            "seeds.",
            hint="Remove it.",
        )
