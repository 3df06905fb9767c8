"""A small training for the tests' ranks: it trains, saves, loads, and reports its state."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.runtime.checkpoint.retention import RetentionPolicy


class Net(nn.Module):
    """Big enough to be split between four ranks; tied weights, buffers, an empty tensor, another dtype."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(width * 4, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width * 4, bias=False)
        self.head.weight = self.embed.weight
        self.rough = nn.Parameter(torch.randn(width, 3).bfloat16())
        self.register_buffer("empty", torch.empty(0, 5))
        self.register_buffer("mask", torch.arange(width) % 3 == 0)
        self.register_buffer("slanted", torch.randn(width, 33).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens)) * self.mask + self.rough.float().sum(1)
        out: torch.Tensor = self.head(hidden)
        return out


class Loader:
    """A loader, whose state each rank saves for itself."""

    def __init__(self, rank: int) -> None:
        self.position, self.rank = 0, rank
        self.noise = torch.zeros(4, dtype=torch.uint8)

    def micro_batches(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "rank": self.rank,
            "noise": self.noise,
            "positions": [(0, 1, None)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.rank, self.noise = state["position"], state["rank"], state["noise"]


class Holder:
    """An object that takes any state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Trainer:
    """One rank's training: model, optimizer, scheduler, loader and their checkpoints."""

    def __init__(self, folder: Path, *, seed: int = 0, **options: Any) -> None:
        self.rank, self.world_size = (
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
        )
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3, 3])
        self.loader = Loader(self.rank)
        self.warnings: list[str] = []
        group = dist.group.WORLD if self.world_size > 1 else None
        self.checkpoints = CheckpointManager(
            folder,
            rank=self.rank,
            world_size=self.world_size,
            group=group,
            warn=self.warnings.append,
            **options,
        )
        self.checkpoints.register(
            model=self.model, opt=self.optimizer, sched=self.scheduler, loader=self.loader
        )

    def step(self, number: int) -> None:
        """Do a step that is the same on every rank and depends on every bit of the state."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 1024, (16,), generator=generator)
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loader.position = number
        self.loader.noise += self.rank + 1

    def digest(self) -> str:
        """A digest of all replicated state."""
        digest = hashlib.blake2b(digest_size=8)
        for key, value in self.model.state_dict().items():
            digest.update(key.encode())
            digest.update(bytes_of(value))
        for index, state in sorted(self.optimizer.state_dict()["state"].items()):
            for key, value in sorted(state.items()):
                digest.update(f"{index} {key}".encode())
                digest.update(bytes_of(value))
        digest.update(repr(self.optimizer.param_groups[0]["lr"]).encode())
        digest.update(repr(sorted(self.scheduler.state_dict().items())).encode())
        return digest.hexdigest()

    def close(self) -> None:
        self.checkpoints.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def draws() -> tuple[float, float]:
    """The next numbers of the generators."""
    return random.random(), torch.rand(1).item()


def make(folder: Path, *steps: int, keep_last: int = 9) -> None:
    """Write checkpoints of one rank, for tests that inspect the folder."""
    trainer = Trainer(folder, policy=RetentionPolicy(keep_last=keep_last))
    for number in range(1, max(steps) + 1):
        trainer.step(number)
        if number in steps:
            trainer.checkpoints.save(number, wait=True)
    assert all(saved.complete for saved in trainer.checkpoints.poll())
    trainer.close()
