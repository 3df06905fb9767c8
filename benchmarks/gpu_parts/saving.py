"""How long a checkpoint of 512 MB stops the training: beside `torch.save`, and `torch.distributed.checkpoint` async."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from checkpoint import SHAPES, Training, with_torch_save
from gpu_parts.result import Result
from paceline.runtime.checkpoint.manager import CheckpointManager

STEPS = 40  # between two saves


def measure(repeats: int) -> list[Result]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    results = []
    folder = Path(tempfile.mkdtemp(prefix="paceline-gpu-"))
    try:
        for name, parameters in SHAPES.items():
            training = Training(parameters=parameters, megabytes=512, device="cuda")
            training.token = training.token.cuda()
            ours, theirs = blocking(training, folder / name, repeats)
            targets = {"torch.save": 20.0}
            results.append(Result(f"pause for a checkpoint, {name}", "ms", ours, theirs, targets))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    return results


def blocking(
    training: Training, folder: Path, repeats: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the milliseconds that each save takes away from the loop."""
    (folder / "torch.save").mkdir(parents=True)
    manager = CheckpointManager(folder / "ours", rank=0, world_size=1, group=None)
    manager.register(model=training.model, opt=training.optimizer)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"torch.save": [], "DCP async": []}
    for turn in range(repeats + 1):
        torch.cuda.synchronize()
        seconds = {"ours": manager.save(turn + 1)}
        training.steps(STEPS, manager.poll)
        manager.save(turn + 1, wait=True)
        seconds["torch.save"] = with_torch_save(training, folder / "torch.save", 0, turn)
        training.steps(STEPS, lambda: None)
        torch.cuda.synchronize()
        began = time.perf_counter()
        writing = checkpoint.async_save(training.state(), checkpoint_id=folder / f"dcp-{turn}")
        seconds["DCP async"] = time.perf_counter() - began
        training.steps(STEPS, lambda: None)
        writing.result()
        shutil.rmtree(folder / f"dcp-{turn}", ignore_errors=True)
        if turn:  # the first one allocates memory
            ours.append(seconds["ours"] * 1e3)
            for peer, found in theirs.items():
                found.append(seconds[peer] * 1e3)
    manager.close()
    return ours, theirs
