"""A small training that is identical to the last bit however often it is interrupted, with faults and gates.

A fault `STEP:RANK:KIND` happens once, in the body of that step: kill, hang, raise, or (`raise!`) raise every time.
At a gate, ranks wait once until the test opens it: `start` (before the resume), `warm-up` (after it),
`step-N`, `evaluate-N` (the evaluation after epoch N), `save-N` (while the checkpoint of step N is being written).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.runtime.step_boundary import stragglers

EPOCHS, PER_EPOCH, BATCH = 5, 12, 8


class Net(nn.Module):
    """Dropout, so that the random numbers of every rank matter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Items(TensorDataset):
    """Items that workers fetch: a plain TensorDataset is read without any."""


class Faults:
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.out = Path(args.out)
        self.rank = rank
        self.gates = args.gates.split(",") if args.gates else []
        self.faults = [fault.split(":") for fault in args.faults.split(",") if fault]
        self.step = 0
        self.straggler, self.pause = args.straggler, args.pause
        stragglers.MIN_DURATION = 0.0  # the training is short
        self._fsync = os.fsync
        if any(gate.startswith("save-") for gate in self.gates):
            os.fsync = self._slow_fsync

    def gate(self, name: str) -> None:
        if name not in self.gates or (self.out / f"go-{name}").exists():
            return
        (self.out / f"at-{name}-{self.rank}").touch()
        deadline = time.monotonic() + 90
        while not (self.out / f"go-{name}").exists():
            assert time.monotonic() < deadline, f"the gate stays closed: {name}"
            time.sleep(0.02)

    def _slow_fsync(self, descriptor: int) -> None:
        """Slow the disk down while a checkpoint is written."""
        if threading.current_thread() is not threading.main_thread():
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            for gate in self.gates:
                if gate.startswith("save-") and f"step-{int(gate[5:]):08d}" in path:
                    self.gate(gate)
        self._fsync(descriptor)

    def in_step(self, step: int) -> None:
        self.step = step
        self.gate(f"step-{step}")
        time.sleep(self.pause * (4 if self.rank == self.straggler else 1))
        for at, rank, kind in self.faults:
            mark = self.out / f"fault-{at}-{rank}-{kind}"
            if (int(at), int(rank)) != (step, self.rank) or (
                mark.exists() and not kind.endswith("!")
            ):
                continue
            mark.touch()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise RuntimeError(f"an error in step {step}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--gates", default="")
    parser.add_argument("--faults", default="")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--straggler", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--spawn", action="store_true")
    args = parser.parse_args()
    with paceline.session(
        seed=7, deterministic=True, cpu=True, save_every_steps=5, keep_last=3, progress=False
    ) as run:
        train(run, args, Faults(args, run.rank))


def train(run: paceline.Run, args: argparse.Namespace, faults: Faults) -> None:
    generator = torch.Generator().manual_seed(3)
    samples = PER_EPOCH * BATCH
    x = torch.randn(samples, 8, generator=generator)
    y = torch.randint(4, (samples,), generator=generator)
    model = run.wrap(Net(run.params.get("dropout", 0.2)))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * PER_EPOCH)
    data = Items(x, y) if args.workers else TensorDataset(x, y)
    loader = run.loader(data, batch_size=BATCH, num_workers=args.workers)
    faults.gate("start")
    run.resume(model=model, opt=opt, sched=sched, loader=loader)
    faults.gate("warm-up")
    attempt = os.environ.get("PACELINE_ATTEMPT", "1")
    with open(faults.out / f"losses-{attempt}-{run.rank}.txt", "a", buffering=1) as losses:
        for epoch in run.epochs(EPOCHS):
            model.train()
            for inputs, labels in run.steps(loader):
                faults.in_step(run.step + 1)
                loss = F.cross_entropy(model(inputs), labels)
                run.backward(loss)
                run.update(opt)
                sched.step()
                run.log(loss=loss)
                losses.write(f"{run.step + 1} {loss.item().hex()}\n")
            model.eval()
            hits = torch.zeros(())
            with torch.no_grad():
                for inputs, labels in run.evaluate(TensorDataset(x[:40], y[:40]), batch_size=BATCH):
                    faults.gate(f"evaluate-{epoch}")
                    hits += (model(inputs).argmax(1) == labels).sum()
            run.log(hits=run.sum(hits))
    if run.is_rank_zero:
        torch.save(model.state_dict(), faults.out / "final.pt")


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        paceline.spawn(main)
    else:
        main()
