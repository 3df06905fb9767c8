"""Randomness that belongs to the sample, not to the process that loads it.

Python's, NumPy's and torch's generators are seeded from (seed, epoch, index) before each item. Its
augmentation is therefore the same on every rank, in every worker and after a resume, and different
in every epoch. Generators that a dataset creates itself (`self.rng = ...`) are not covered.
`item_source` and `streams` seed the workers themselves.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import Dataset, Subset

from paceline.runtime.randomness import derive_seed, host_state, seed_host

T = TypeVar("T")


class PaddingKey(NamedTuple):
    """Asks for an empty batch. `key` is that of any item, which serves as the example."""

    key: Any


class PaddingItem(NamedTuple):
    """The item to make an empty batch of."""

    item: Any


class SeededDataset(Dataset[T], Generic[T]):
    """A dataset whose keys are (epoch, number, index) and whose items each have a seed of (seed,
    epoch, number).

    A dataset that fetches whole batches (`__getitems__`, as Hugging Face datasets do) is asked for
    them, unless it draws random numbers: these would depend on how batches are split. Its items are
    then fetched one by one.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.fetches_batches = fetches_batches(dataset)

    def __getitem__(self, key: tuple[int, int, Any]) -> T:
        epoch, number, index = key
        seed_host(derive_seed(self.seed, epoch, number))
        item: T = self.dataset[index]
        return item

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        if type(keys[0]) is PaddingKey:
            return [PaddingItem(self[keys[0].key])]
        if self.fetches_batches:
            epoch, number, _ = keys[0]
            seed_host(derive_seed(self.seed, epoch, number))
            before = host_state()
            items: list[Any] = self.dataset.__getitems__([index for _, _, index in keys])
            if host_state() == before:
                return items
            self.fetches_batches = False
        return [self[key] for key in keys]

    def __len__(self) -> int:
        return len(self.dataset)


def fetches_batches(dataset: Any) -> bool:
    """Return whether a dataset has `__getitems__`. A Subset always has it, but only passes it
    on.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
