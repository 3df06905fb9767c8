"""Randomness that belongs to the sample, not to the process that loads it.

Python's, NumPy's and torch's generators are seeded from (seed, epoch, index) before each item. Its augmentation is
therefore the same on every rank, in every worker and after a resume, and different in every epoch. Generators that
a data set creates itself (`self.rng = ...`) are not covered.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset

T = TypeVar("T")

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """Return a well-mixed 64-bit seed that depends on all the numbers (splitmix64, folded over them)."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_host(seed: int) -> None:
    """Seed the generators that data sets use: Python's, NumPy's and torch's on the CPU. Takes a few microseconds.

    `torch.manual_seed` would also reseed the GPU generators, which the model's dropout uses.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """Restore the host generators on exit: loading data in the main process must not disturb the model."""
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch on every device; `deterministic` also selects repeatable kernels."""
    seed &= _MASK
    seed_host(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is created, and can't be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


class SeededDataset(Dataset[T], Generic[T]):
    """A data set whose keys are (epoch, index) and whose items each have their own seed."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> T:
        epoch, index = key
        seed_host(derive_seed(self.seed, epoch, index))
        item: T = self.dataset[index]
        return item

    def __len__(self) -> int:
        return len(self.dataset)
