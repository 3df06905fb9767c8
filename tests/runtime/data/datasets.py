"""Datasets for the tests: random items, and streams."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each item draws from all three generators that augmentation uses."""

    def __init__(self, samples: int, width: int = 6, dtype: torch.dtype = torch.float64) -> None:
        self.x = torch.randn(
            samples, width, generator=torch.Generator().manual_seed(5), dtype=dtype
        )
        self.y = self.x[:, :3].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + numpy.random.rand() + torch.rand(()).double().item()
        return self.x[index] + noise, self.y[index]


class Numbers(Dataset[int]):
    """The item is its index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Endless(Numbers):
    """Items that never arrive; each worker that waits for one leaves a file."""

    def __init__(self, samples: int, folder: str) -> None:
        super().__init__(samples)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> int:
        (self.folder / str(os.getpid())).touch()
        time.sleep(3600)
        return index


class Counting(IterableDataset[int]):
    """0, 1, 2, ... shuffled a little by the global generators; saves no position."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        waiting: list[int] = []
        for item in range(self.items):
            waiting.append(item)
            if len(waiting) > 3:
                yield waiting.pop(random.randrange(len(waiting)))
        yield from waiting


class Positioned(IterableDataset[int]):
    """A stream that saves its position, and records where each pass started."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.position = {"next": 0}
        self.read_from: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.read_from.append(self.position["next"])
        while self.position["next"] < self.items:
            self.position["next"] += 1
            yield self.position["next"] - 1
        self.position["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.position  # itself, which changes as the stream is read

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position.update(state)
