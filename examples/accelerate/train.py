"""A training loop with Accelerate, without any Paceline code: it saves when it is asked to stop,
and it resumes.

python train.py                                    one process, as usual
paceline run --cpu --nproc 2 train.py              two ranks
paceline submit --nodes 2 --gpus 4 train.py        eight ranks on a Slurm cluster

Accelerate installs no signal handler, so the script installs its own. When the run should stop,
Paceline sends SIGUSR1. The script then saves and exits with 75, which means "start me again".
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

START_ME_AGAIN = 75


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points on three spiral arms, each labelled with its arm."""
    draw = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (count,), generator=draw)
    radius = torch.rand(count, generator=draw)
    angle = 5 * radius + arms * 2 * math.pi / 3 + 0.15 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


class Checkpoints:
    """Folders named by their step. One that is not complete has another name."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder, self.accelerator = folder, accelerator

    def newest(self) -> int:
        """Return the step of the newest one; 0 if there is none."""
        return max(
            (int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")), default=0
        )

    def load(self, step: int) -> None:
        self.accelerator.load_state(self.folder / f"step-{step}")

    def save(self, step: int) -> None:
        partial = self.folder / f"partial-{step}"
        self.accelerator.save_state(partial)
        self.accelerator.wait_for_everyone()  # each rank saves its random numbers
        if self.accelerator.is_main_process:
            partial.rename(self.folder / f"step-{step}")
            for path in self.folder.iterdir():
                if path.name != f"step-{step}":
                    shutil.rmtree(path)
        self.accelerator.wait_for_everyone()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step and rank (32)")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--samples", type=int, default=6000)
    # in the run folder, if Paceline started the ranks
    folder = os.environ.get("PACELINE_CHECKPOINTS", "checkpoints")
    parser.add_argument("--folder", type=Path, default=folder, help="where to save (%(default)s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    requests: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: requests.append(number))
    # The order of the samples depends on the epoch alone, so the batches that are done can be
    # skipped.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    train = DataLoader(spirals(args.samples, seed=1), args.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(spirals(1000, seed=2), batch_size=250)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    model, optimizer, train, test = accelerator.prepare(net, optimizer, train, test)

    checkpoints = Checkpoints(args.folder, accelerator)
    step = checkpoints.newest()
    if step:
        checkpoints.load(step)
        accelerator.print(f"resumed at step {step}", flush=True)

    while step < args.epochs * len(train):
        epoch, done = divmod(step, len(train))
        train.set_epoch(epoch)
        for points, arms in skip_first_batches(train, done) if done else train:
            loss = F.cross_entropy(model(points), arms)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            # The signal does not reach all ranks in the same step, so they ask each other after
            # every step.
            must_stop = bool(
                accelerator.reduce(torch.tensor(float(len(requests)), device=accelerator.device))
            )
            if must_stop or step % len(train) == 0:
                checkpoints.save(step)
            if must_stop:
                accelerator.end_training()
                raise SystemExit(START_ME_AGAIN)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    right = []
    for points, arms in test:
        with torch.no_grad():
            guesses, truth = accelerator.gather_for_metrics((model(points).argmax(dim=1), arms))
        right.append(guesses == truth)
    accuracy = torch.cat(right).float().mean().item()
    accelerator.print(f"final test accuracy: {accuracy:.2%}", flush=True)
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
