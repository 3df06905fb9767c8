"""Randomness that belongs to the sample, not to the process that happens to load it.

Each item is made with Python's, NumPy's and torch's generators seeded from (seed, epoch, index). So its
augmentation is the same on every rank, in every worker and after a resume, and differs in every epoch.
Generators that a data set keeps for itself (`self.rng = ...`) are its own affair.
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

Key = tuple[int, int]  # (epoch, index): what the sampler asks a data set for


def mix(*numbers: int) -> int:
    """A well-stirred 64-bit number from a few: splitmix64, folded over them."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_host(seed: int) -> None:
    """Seed the generators that data sets use: Python's, NumPy's, torch's on the CPU. A few microseconds.

    Not `torch.manual_seed`: it reaches for the GPUs' generators too, where the model's dropout lives.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def host_randomness_kept() -> Iterator[None]:
    """Put the generators back as they were: loading data in the main process must not disturb the model's."""
    python, cpu = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    kept = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(cpu)
        if numpy is not None and kept is not None:
            numpy.random.set_state(kept)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch on every device; `deterministic` also asks torch for repeatable kernels."""
    seed &= _MASK
    seed_host(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads it when its first handle is made, and refuses to be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


class Seeded(Dataset[T], Generic[T]):
    """A data set that is asked for (epoch, index) and makes each item with its own randomness."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: Key) -> T:
        epoch, index = key
        seed_host(mix(self.seed, epoch, index))
        item: T = self.dataset[index]
        return item

    def __len__(self) -> int:
        return len(self.dataset)
