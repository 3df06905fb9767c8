"""The overhead of a training loop: the same tiny step in plain torch and with each library, in one run.

    python benchmarks/loop.py [--steps 1000] [--rounds 9]

A 784-128-10 network on batches of 32, on one core. Batches are created beforehand, so that only the loop is measured.
The libraries take turns for several rounds, and each one's fastest round counts. The benchmark measures processor time
rather than wall time: other load on the machine affects it less, and it includes threads that a library starts. Fabric
and Accelerate run without logging; Paceline logs and writes the loss in every step.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from torch import nn

from machine import describe, show

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
            # Most numbers are written during the loop. Writing the rest is part of the cost.
            run._boundary.finish(run.step)
            took = (time.process_time() - began) / steps
            lines = (Path(folder) / "metrics.jsonl").read_text().count("\n")
            assert lines == WARMUP + steps, f"{lines} lines of metrics for {WARMUP + steps} steps"
    return took


def fabric_loop(steps: int) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
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


def replica_check(rounds: int = 20) -> tuple[float, float]:
    """Return the seconds of processor time of one check, and those per step by default."""
    import torch.distributed as dist

    from paceline.runtime.settings import Settings
    from paceline.runtime.training.ddp import DDPModel
    from paceline.runtime.training.replica_check import ReplicaCheck

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DDPModel(
        network(),
        device=torch.device("cpu"),
        control=dist.group.WORLD,
        compile_options=False,
        comm_hook=None,
        options={},
    )
    every = Settings().replica_check
    check = ReplicaCheck(SimpleNamespace(models=[model]), group=dist.group.WORLD, every=every)  # type: ignore[arg-type]
    best = float("inf")
    for number in range(rounds):
        began = time.process_time()
        check.check_now(number * every)
        best = min(best, time.process_time() - began)
    dist.destroy_process_group()
    return best, best / every


BARE, OURS, FABRIC = "bare loop", "Paceline, loss logged", "Lightning Fabric"
WAYS: dict[str, Way] = {
    BARE: bare,
    OURS: paceline_loop,
    FABRIC: fabric_loop,
    "Accelerate": accelerate_loop,
}


def measure(steps: int, rounds: int) -> dict[str, float]:
    best: dict[str, float] = {}
    missing: set[str] = set()
    for _ in range(rounds):
        for name, way in WAYS.items():
            if name in missing:
                continue
            try:
                seconds = way(steps)
            except ImportError as error:
                print(f"{name}: not measured, {error.name} is not installed")
                missing.add(name)
                continue
            best[name] = min(seconds, best.get(name, seconds))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    describe("Loop overhead")
    best = measure(options.steps, options.rounds)
    base = best[BARE]
    rows = [
        (name, f"{each * 1e6:.1f}", f"{(each - base) * 1e6:.1f}") for name, each in best.items()
    ]
    show(("", "us a step", "us added"), rows)
    if FABRIC in best:
        ratio = (best[OURS] - base) / (best[FABRIC] - base)
        print(f"Paceline adds {ratio:.2f} of what Fabric adds; target: at most 0.50")
    once, per_step = replica_check()
    print(
        f"With several ranks, a check of the replicas takes {once * 1e6:.0f} us: {per_step * 1e6:.1f} us a step"
    )


if __name__ == "__main__":
    main()
