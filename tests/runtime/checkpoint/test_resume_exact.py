"""A run that is stopped during an epoch and resumed equals an uninterrupted one: every loss, every weight."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint.trainer import bytes_of

SAMPLES, BATCH, EPOCHS = 3200, 16, 2  # 200 steps per epoch, so that the stop comes during one


def example(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, generator=generator), torch.tensor(index % 3)


class Augmented(Dataset[Any]):
    """Map-style, with an augmentation that draws from torch's generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        sample, label = example(index)
        return sample + 0.1 * torch.randn(8), label


class Stream(IterableDataset[Any]):
    """An iterable that saves no position: a resume counts its samples."""

    def __iter__(self) -> Iterator[Any]:
        return map(example, range(SAMPLES))


class StatefulStream(IterableDataset[Any]):
    """An iterable that saves and restores its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < SAMPLES:
            index, self.position = self.position, self.position + 1
            yield example(index)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def resident() -> TensorDataset:
    data, labels = zip(*(example(index) for index in range(SAMPLES)), strict=True)
    return TensorDataset(torch.stack(data), torch.stack(labels))


DATA: dict[str, Any] = {
    "map-style": Augmented,
    "tensors": resident,
    "iterable": Stream,
    "stateful iterable": StatefulStream,
}


def train(folder: Path, kind: str, stop_at: int | None) -> dict[str, Any]:
    """Train to the end, or until the ranks agree to stop; only rank 1 gets the signal, at `stop_at`."""
    losses: dict[int, float] = {}
    weights: list[bytes] = []
    stopped = True
    code: Any = None
    try:
        with paceline.session(seed=7, folder=folder, cpu=True, progress=False, report=False) as run:
            model = run.wrap(
                nn.Sequential(
                    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3)
                )
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
            loader = run.loader(DATA[kind](), batch_size=BATCH)
            run.resume(model=model, opt=optimizer, sched=schedule, loader=loader)
            for _ in run.epochs(EPOCHS):
                for sample, label in run.steps(loader):
                    loss = F.cross_entropy(model(sample), label)
                    run.backward(loss)
                    if run.update(optimizer, clip=1.0):
                        schedule.step()
                    losses[run.step] = loss.item()
                    if stop_at is not None:
                        # so that the stop comes after a few dozen steps, not thousands
                        time.sleep(0.02)
                        if run.rank == 1 and len(losses) == stop_at:
                            os.kill(os.getpid(), signal.SIGUSR1)
            stopped = False
            weights = [bytes_of(value) for value in model.state_dict().values()]
    except SystemExit as left:
        code = left.code
    return {"losses": losses, "weights": weights, "stopped": stopped, "code": code}


@pytest.mark.parametrize(
    "kind",
    [
        "map-style",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("iterable", "tensors", "stateful iterable")
        ),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    straight = ranks(train, 2, tmp_path / "straight", kind, None)
    first = ranks(train, 2, tmp_path / "run", kind, 5)
    second = ranks(train, 2, tmp_path / "run", kind, None)
    for rank in (0, 1):
        whole, before, after = straight[rank], first[rank], second[rank]
        assert before["stopped"]
        assert before["code"] in (0, None)
        assert not after["stopped"]
        assert 5 <= len(before["losses"]) < 399
        assert not set(before["losses"]) & set(after["losses"])  # no step twice
        assert {**before["losses"], **after["losses"]} == whole["losses"]
        assert after["weights"] == whole["weights"]
    assert first[0]["losses"].keys() == first[1]["losses"].keys()
