"""What a training loop costs beside its own work: the same tiny step, bare and under each library, in one run.

A 784-128-10 network on batches of 32, one core. The batches are made beforehand, so that nothing but the loop is
timed. Each way runs in turn, several times over; the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WARMUP = 32, 200
Way = Callable[[int], float]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = [(torch.randn(BATCH, 784), torch.randint(10, (BATCH,))) for _ in range(50)]
    return [made[step % 50] for step in range(steps)]


def bare(steps: int) -> float:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = 0.0
    for step, (x, y) in enumerate(batches(WARMUP + steps)):
        if step == WARMUP:
            began = time.process_time()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - began) / steps


def paceline_loop(steps: int) -> float:
    import paceline

    with tempfile.TemporaryDirectory() as folder:
        with paceline.session(cpu=True, report=False, folder=folder) as run:
            model = run.wrap(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            began = 0.0
            for x, y in run.steps(batches(WARMUP + steps)):
                if run.step == WARMUP:
                    began = time.process_time()
                with run.autocast():
                    loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                run.update(optimizer)
                run.log(loss=loss)
            # Numbers are folded and written as the loop goes; what is left of them is part of the price.
            run._boundary.finish()
            took = (time.process_time() - began) / steps
            lines = (Path(folder) / "metrics.jsonl").read_text().count("\n")
            assert lines == WARMUP + steps, f"{lines} lines of metrics for {WARMUP + steps} steps"
    return took


def fabric_loop(steps: int) -> float:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(
            accelerator="cpu", devices=1, loggers=CSVLogger(folder, flush_logs_every_n_steps=1000)
        )
        fabric.launch()
        plain = network()
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        began = 0.0
        for step, (x, y) in enumerate(batches(WARMUP + steps)):
            if step == WARMUP:
                began = time.process_time()
            with fabric.autocast():
                loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if LOGGING:
                fabric.log("loss", loss, step=step)
        return (time.process_time() - began) / steps


def accelerate_loop(steps: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = network()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    began = 0.0
    for step, (x, y) in enumerate(batches(WARMUP + steps)):
        if step == WARMUP:
            began = time.process_time()
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return (time.process_time() - began) / steps


LOGGING = False
WAYS: dict[str, Way] = {
    "bare loop": bare,
    "Paceline (with log)": paceline_loop,
    "Lightning Fabric": fabric_loop,
    "Accelerate": accelerate_loop,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, way in WAYS.items():
            try:
                seconds = way(options.steps)
            except ImportError as missing:
                print(f"{name}: not measured ({missing.name} is not installed)", file=sys.stderr)
                continue
            best[name] = min(seconds, best.get(name, seconds))
    base = best["bare loop"]
    print(f"{'':22} {'us / step':>10} {'added us':>10}")
    for name, seconds in best.items():
        print(f"{name:22} {seconds * 1e6:10.1f} {(seconds - base) * 1e6:10.1f}")
    if "Lightning Fabric" in best:
        ours, theirs = best["Paceline (with log)"] - base, best["Lightning Fabric"] - base
        print(
            f"Paceline adds {ours / theirs:.2f} of what Fabric adds (at most 0.5 is wanted); Fabric logs nothing here"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
