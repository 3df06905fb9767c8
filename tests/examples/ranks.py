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

from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"


def import_from(example: str, module: str) -> Any:
    """Import a module of an example. In a forked rank only: examples use the same names."""
    folder = str(EXAMPLES / example)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def run_example(example: str, args: list[str], stop_at: int | None = None) -> tuple[Any, str]:
    """Return what `main` returned and printed. With `stop_at`, rank 0 gets SIGTERM in that step."""
    train = import_from(example, "train")
    log = paceline.Run.log

    def log_and_stop(run: paceline.Run, **values: Any) -> None:
        log(run, **values)
        if run.step == stop_at and run.rank == 0:
            signal.raise_signal(signal.SIGTERM)

    paceline.Run.log = log_and_stop  # type: ignore[method-assign]
    returned = None
    # A stop ends the script, with code 0.
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        returned = train.main(["--cpu", *args])
    return returned, printed.getvalue()


def run_plain(example: str, args: list[str], stop_at: int | None = None) -> tuple[Any, str]:
    """Return what `main` of an example without the runtime returned, or its exit code, and what it printed.

    With `stop_at`, the last rank gets SIGUSR1 after that step: the others must learn of it.
    """
    steps = itertools.count(1)
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def stop(*_: Any) -> None:
        if next(steps) == stop_at and is_last:
            signal.raise_signal(signal.SIGUSR1)

    register_optimizer_step_post_hook(stop)
    train = import_from(example, "train")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            returned = train.main(args)
        except SystemExit as leaving:
            returned = leaving.code
    return returned, printed.getvalue()


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of the newest checkpoint, with its name."""
    newest = max(path for path in (folder / "checkpoints").glob("step-*") if (path / "complete.json").exists())
    found: dict[str, Any] = {}
    for path in sorted(newest.rglob("*.safetensors")):
        found |= {f"{newest.name}/{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def logged(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}
