"""Cost of a checkpoint for the training, compared with `torch.save` + fsync of the same state in the same run.

    python benchmarks/checkpoint.py [--device cpu|cuda] [--ranks 1 2] [--saves 5] [--megabytes 512]

"Blocking" is how long a save stops the loop. "Total" is how much longer the same steps take with saves than without,
per save, until the last one is on disk: the blocking, plus what the writing in the background takes from the steps.
With `torch.save`, rank 0 saves and the others wait for it, as in most scripts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.runtime.checkpoint.manager import CheckpointManager

from machine import describe, show

# parameters; Adam adds two tensors and a number for each
SHAPES = {"few tensors": 12, "thousands": 1280}
TARGETS = {1: 8.0, 2: 10.0}
SECONDS_OF_STEPS = 1.5  # between two saves, enough to write one


@dataclass(frozen=True)
class Cost:
    blocking: float
    total: float


class Training:
    """A model with Adam state of `megabytes` in total, and a step that keeps the CPU or GPU busy."""

    def __init__(self, *, parameters: int, megabytes: int, device: str) -> None:
        each = megabytes * 1_000_000 // 12 // parameters
        self.model = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(each)) for _ in range(parameters)]
        )
        self.model.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=device == "cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.device = device
        size = 4096 if device == "cuda" else 512
        self.left = torch.randn(size, size, device=device)
        self.token = torch.zeros(1)

    def step(self) -> None:
        for _ in range(2):
            self.left = torch.tanh(self.left @ self.left)
        if self.device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.all_reduce(self.token)  # ranks wait for each other, as in training

    def steps(self, count: int, boundary: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self.step()
            boundary()
        return time.perf_counter() - start

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "opt": self.optimizer.state_dict()}


def with_torch_save(training: Training, folder: Path, rank: int, step: int) -> float:
    start = time.perf_counter()
    if rank == 0:
        path = folder / f"step-{step}.pt"
        with open(path.with_suffix(".partial"), "wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".partial"), path)
        for old in folder.glob("*.pt"):
            if old != path:
                old.unlink()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def measure(
    rank_args: tuple[int, int, int], options: argparse.Namespace, folder: str, results_queue: Any
) -> None:
    rank, world_size, port = rank_args
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
        )
    results = {}
    for name, parameters in SHAPES.items():
        training = Training(
            parameters=parameters, megabytes=options.megabytes, device=options.device
        )
        training.steps(5, lambda: None)
        seconds = torch.tensor(training.steps(10, lambda: None) / 10)
        if world_size > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        count = max(5, round(SECONDS_OF_STEPS / seconds.item()))
        results[name] = compare(
            training, Path(folder) / name, rank, world_size, count=count, saves=options.saves
        )
        shutil.rmtree(Path(folder) / name, ignore_errors=True)
    results_queue.put((rank, results))
    if world_size > 1:
        dist.destroy_process_group()


def compare(
    training: Training, folder: Path, rank: int, world_size: int, *, count: int, saves: int
) -> tuple[Cost, Cost]:
    """Run the loop without saves, with ours and with torch.save in turn, `saves` times."""
    (folder / "theirs").mkdir(parents=True, exist_ok=True)
    group = dist.group.WORLD if world_size > 1 else None
    ours = CheckpointManager(folder / "ours", rank=rank, world_size=world_size, group=group)
    ours.register(model=training.model, opt=training.optimizer)
    ours.poll(), ours.poll()
    training.steps(count, lambda: None)
    blocking: dict[str, list[float]] = {"ours": [], "theirs": []}
    total: dict[str, list[float]] = {"bare": [], "ours": [], "theirs": []}
    for turn in range(1, saves + 1):
        total["bare"].append(training.steps(count, lambda: None))
        start = time.perf_counter()
        blocking["ours"].append(ours.save(turn))
        training.steps(count, ours.poll)
        ours.save(turn, wait=True)  # wait for the writing, in case it takes longer than the steps
        total["ours"].append(time.perf_counter() - start)
        assert all(saved.complete for saved in ours.poll())
        start = time.perf_counter()
        blocking["theirs"].append(with_torch_save(training, folder / "theirs", rank, turn))
        training.steps(count, lambda: None)
        total["theirs"].append(time.perf_counter() - start)
    ours.close()
    bare = statistics.median(total["bare"])
    mine, theirs = (
        Cost(statistics.median(blocking[who]), statistics.median(total[who]) - bare)
        for who in ("ours", "theirs")
    )
    return mine, theirs


def run(world_size: int, options: argparse.Namespace) -> dict[str, tuple[Cost, Cost]]:
    """Return the costs on the slowest rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results_queue = context.Queue()
    folder = tempfile.mkdtemp(prefix="paceline-checkpoint-", dir=options.folder)
    try:
        processes = [
            context.Process(
                target=measure, args=((rank, world_size, port), options, folder, results_queue)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        costs = [results_queue.get(timeout=600)[1] for _ in processes]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        name: tuple(
            Cost(
                max(rank[name][who].blocking for rank in costs),
                max(rank[name][who].total for rank in costs),
            )
            for who in (0, 1)
        )
        for name in SHAPES
    }  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, nargs="+", default=None)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument(
        "--folder", default=None, help="Folder to write to (default: the temporary folder)."
    )
    options = parser.parse_args()
    world_sizes = options.ranks or ([1] if options.device == "cuda" else [1, 2])
    describe(f"one checkpoint of {options.megabytes} MB on {options.device}")
    rows, reached = [], True
    for world_size in world_sizes:
        for name, (ours, theirs) in run(world_size, options).items():
            ratio = theirs.blocking / ours.blocking
            target = TARGETS.get(world_size, 10.0)
            reached &= ratio >= target
            rows.append(
                (
                    f"{world_size} rank{'s' * (world_size > 1)}, {name}",
                    f"{ours.blocking * 1e3:.0f} ms",
                    f"{theirs.blocking * 1e3:.0f} ms",
                    f"{ratio:.1f} x (target: {target:g})",
                    f"{ours.total * 1e3:.0f} ms",
                    f"{theirs.total * 1e3:.0f} ms",
                )
            )
    columns = ("", "blocking", "torch.save", "ratio", "total", "torch.save, total")
    show(columns, rows)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
