"""Run an example's `main` on forked ranks, and compare what two runs have saved."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.forked_ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def import_from(example: str, module: str) -> Any:
    """Import a module of an example. In a forked rank only: examples use the same names."""
    folder = str(EXAMPLES / example)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def run_example(example: str, args: list[str], stop_at: int | None = None) -> tuple[Any, str]:
    """Return what `main` returned and printed. With `stop_at`, rank 0 gets SIGTERM in that step."""
    return _run(example, ["--cpu", *args], stop_at, rank=0, number=signal.SIGTERM)


def run_plain(example: str, args: list[str], stop_at: int | None = None) -> tuple[Any, str]:
    """The same for an example without the runtime: the last rank gets SIGUSR1, and the others must learn of it."""
    last = int(os.environ["WORLD_SIZE"]) - 1
    return _run(example, ["--cpu", *args], stop_at, rank=last, number=signal.SIGUSR1)


def _run(
    example: str, args: list[str], stop_at: int | None, *, rank: int, number: int
) -> tuple[Any, str]:
    """Return the exit code instead if `main` exits, or None for 0: so the runtime ends a script that was stopped."""
    steps = itertools.count(1)

    def stop(*_: Any) -> None:
        if next(steps) == stop_at and os.environ["RANK"] == str(rank):
            signal.raise_signal(number)

    register_optimizer_step_post_hook(stop)
    train = import_from(example, "train")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            returned = train.main(args)
        except SystemExit as leaving:
            returned = leaving.code or None
    return returned, printed.getvalue()


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of the newest checkpoint, with its name."""
    newest = max(
        path
        for path in (folder / "checkpoints").glob("step-*")
        if (path / "complete.json").exists()
    )
    found: dict[str, Any] = {}
    for path in sorted(newest.rglob("*.safetensors")):
        found |= {
            f"{newest.name}/{path.name}/{name}": tensor for name, tensor in load_file(path).items()
        }
    return found


def assert_same_end(parts: Path, whole: Path) -> None:
    """Check that an interrupted run has logged the same losses and saved the same tensors as a whole one."""
    assert logged(parts, "loss") == logged(whole, "loss")
    expected, found = saved_tensors(whole), saved_tensors(parts)
    assert found.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def learn_and_resume(
    ranks: Ranks, example: str, args: list[str], base: Path, *, stop_at: int, last: int
) -> tuple[float, str]:
    """Train on two ranks to the end, and stopped in between to the same end; return the result and the output."""

    def train(folder: Path, *stop: int) -> list[tuple[Any, str]]:
        given = [*args, "--folder", str(folder)]
        return ranks(run_example, 2, example, given, *stop, timeout=300)

    whole, parts = base / "whole", base / "parts"
    (result, printed), (other, silent) = train(whole)
    assert result == other
    assert silent == ""
    assert train(parts, stop_at)[0][0] is None
    assert stop_at <= max(logged(parts, "loss")) < last, "it was stopped in the middle"
    assert train(parts)[0][0] == result
    assert_same_end(parts, whole)
    return result, printed


def logged(folder: Path, name: str) -> dict[int, float]:
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {line["step"]: line[name] for line in lines if name in line}
