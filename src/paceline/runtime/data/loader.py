"""`make_loader`: the right loader for any data set.

`MapLoader` and `StreamLoader` share one interface: `micro_batches(epoch)`, `steps_per_epoch`, `state_dict`,
`load_state_dict` and `close`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.runtime.data.item_source import ItemOptions
from paceline.runtime.data.map_loader import MapLoader
from paceline.runtime.data.streams.stream_loader import StreamLoader
from paceline.runtime.distributed.identity import Identity

if TYPE_CHECKING:
    from typing_extensions import Unpack


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    accumulate: int = 1,
    shuffle: bool | None = None,
    drop_last: bool = True,
    seed: int = 0,
    identity: Identity | None = None,
    device: torch.device | str | None = None,
    resident: bool = False,
    sharded: bool = False,
    group: Any = None,
    num_workers: int = 0,
    **items: Unpack[ItemOptions],
) -> MapLoader | StreamLoader:
    """Return a `MapLoader`, or a `StreamLoader` if the data set is iterable-style.

    Map-style data sets are shuffled by default. `sharded` means that an iterable already splits itself by rank
    and worker. Ranks use `group` to agree on the end of an iterable; a gloo group keeps the device out of it.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "run.loader() takes a data set, but got a torch DataLoader.",
            hint="Pass the data set itself: run.loader(dataset, batch_size=<global>, num_workers=...).",
        )
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        return MapLoader(
            dataset, batch_size=batch_size, accumulate=accumulate, shuffle=shuffle is not False,
            drop_last=drop_last, seed=seed, identity=identity, device=device, resident=resident,
            num_workers=num_workers, **items,
        )  # fmt: skip
    for name, requested in (("shuffle", bool(shuffle)), ("resident", resident)):
        if requested:
            raise UsageError(
                f"{name}=True doesn't work with {type(dataset).__name__}: a stream decides its own order.",
                hint=f"Remove {name}, or use a data set with __len__ and __getitem__.",
            )
    return StreamLoader(
        dataset, batch_size=batch_size, accumulate=accumulate, drop_last=drop_last, sharded=sharded, seed=seed,
        identity=identity, device=device, group=group, num_workers=num_workers,
        collate_fn=items.get("collate_fn"), prefetch_factor=items.get("prefetch_factor"),
        worker_init_fn=items.get("worker_init_fn"),
    )  # fmt: skip
