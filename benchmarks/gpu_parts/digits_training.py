"""MNIST: images per second, and the time to 99 % on the test set, beside a script with a DataLoader.

The usual script has four workers with pinned memory, a loss that is printed every 100 steps, and no other tricks.
Paceline runs the step of examples/mnist: on resident data, in bf16, as one CUDA graph. For images per second the model
is compiled as well; for the time to 99 % it is not, since compiling would take longer than the training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline
from gpu_parts.result import Result

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist"
GOAL, MAX_EPOCHS = 0.99, 12


def load(folder: Path | None, part: str) -> Any:
    import digits

    return digits.load(folder or digits.SUBSET, part)


class Usual:
    """The script that most people write."""

    def __init__(self, folder: Path | None, batch_size: int, seed: int) -> None:
        from train import Net

        torch.manual_seed(seed)
        options: dict[str, Any] = {"num_workers": 4, "pin_memory": True, "persistent_workers": True}
        self.loader = DataLoader(
            load(folder, "train"), batch_size, shuffle=True, drop_last=True, **options
        )
        self.test_loader = DataLoader(load(folder, "t10k"), 1000, **options)
        self.model = Net().cuda()
        self.optimizer = torch.optim.Adadelta(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)

    def epochs(self) -> Iterator[int]:
        """Train an epoch at a time, and yield how many images that were."""
        while True:
            seen = 0
            for step, (images, labels) in enumerate(self.loader):
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(images.cuda()), labels.cuda())
                loss.backward()
                self.optimizer.step()
                seen += len(labels)
                if step % 100 == 0:
                    print(f"loss {loss.item():.3f}", end="\r", file=sys.stderr)
            self.schedule.step()
            torch.cuda.synchronize()
            yield seen

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        hits = [
            (self.model(images.cuda()).argmax(1) == labels.cuda()).sum()
            for images, labels in self.test_loader
        ]
        self.model.train()
        return float(sum(hits).item()) / len(self.test_loader.dataset)  # type: ignore[union-attr,arg-type]


class Ours:
    """The loop of examples/mnist."""

    def __init__(
        self, run: paceline.Run, folder: Path | None, batch_size: int, *, compiled: bool
    ) -> None:
        from train import Net

        self.run = run
        self.model = run.wrap(Net().to(memory_format=torch.channels_last), compile=compiled)
        self.optimizer = torch.optim.Adadelta(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.loader = run.loader(load(folder, "train"), batch_size=batch_size, resident=True)
        self.test_set = load(folder, "t10k")
        self.step = run.capture(self.train)

    def train(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with self.run.autocast():
            loss = F.cross_entropy(self.model(images), labels)
        self.run.backward(loss)
        self.run.update(self.optimizer)
        self.run.log(loss=loss)

    def epochs(self) -> Iterator[int]:
        for _ in self.run.epochs(1000):
            seen = 0
            for images, labels in self.run.steps(self.loader):
                self.step(images, labels)
                seen += len(labels)
            self.schedule.step()
            torch.cuda.synchronize()
            yield seen

    @torch.no_grad()
    def accuracy(self) -> float:
        from train import test

        return test(self.run, self.model, self.test_set, 1000)


def rates(training: Usual | Ours, repeats: int) -> list[float]:
    """Return images per second of each epoch but the first, which warms up."""
    epochs, found = training.epochs(), []
    next(epochs)
    for _ in range(repeats):
        began = time.perf_counter()
        found.append(next(epochs) / (time.perf_counter() - began))
    return found


def time_to_goal(training: Usual | Ours) -> tuple[float, float]:
    """Return the seconds until the test accuracy is 99 %, and the accuracy."""
    began = time.perf_counter()
    for epoch, _ in enumerate(training.epochs()):
        accuracy = training.accuracy()
        if accuracy >= GOAL or epoch + 1 == MAX_EPOCHS:
            return time.perf_counter() - began, accuracy
    raise AssertionError


def session(seed: int) -> Any:
    return paceline.session(seed=seed, precision="bf16", progress=False, report=False)


def measure(folder: Path | None, repeats: int) -> list[Result]:
    sys.path.insert(0, str(EXAMPLE))
    results = []
    for batch_size, target in ((64, {"the usual script": 7.0}), (512, {})):
        with session(1) as run:
            ours = rates(Ours(run, folder, batch_size, compiled=True), 2 * repeats)
        theirs = rates(Usual(folder, batch_size, 1), repeats)
        results.append(
            Result(
                f"MNIST, batch {batch_size}", "images/s", ours, {"the usual script": theirs}, target
            )
        )
    if folder is None:
        print("time to 99 %: not measured, it needs the full set (--data-dir)")
        return results
    ours_seconds, usual_seconds, accuracies = [], [], {}
    for seed in range(1, repeats + 1):
        with session(seed) as run:
            seconds, accuracies[f"accuracy, seed {seed}"] = time_to_goal(
                Ours(run, folder, 64, compiled=False)
            )
        ours_seconds.append(seconds)
        seconds, accuracies[f"accuracy of the usual script, seed {seed}"] = time_to_goal(
            Usual(folder, 64, seed)
        )
        usual_seconds.append(seconds)
    peer = {"the usual script": usual_seconds}
    results.append(
        Result(
            "MNIST, time to 99 %", "s", ours_seconds, peer, {"the usual script": 5.0}, accuracies
        )
    )
    return results
