"""The soak itself: a run that differs from the undisturbed one is found, and a seed gives the same runs again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from paceline.contract.run_folder import RunFolder
from tests.fault_tolerance.runs import STEPS, Training
from tests.soak.runs import Disk, Shape, SoakRun


def make_training(home: Path, *, steps: int = STEPS, weight: float = 1.0) -> Training:
    training = Training(home)
    losses = "".join(f"{step} {float(step).hex()}\n" for step in range(1, steps + 1))
    (training.out / "losses-1-0.txt").write_text(losses)
    torch.save({"weight": torch.tensor(weight)}, training.out / "final.pt")
    return training


def compare(tmp_path: Path, **difference: Any) -> str:
    undisturbed = make_training(tmp_path / "undisturbed")
    home = make_training(tmp_path / "ours", **difference).home
    disk = Disk.__new__(Disk)  # no file system of its own
    return SoakRun(1, Shape(1, 1, "fork", "main", 0.0), home, disk, RunFolder(home)).compare(undisturbed)


def test_an_equal_run_is_exact(tmp_path: Path) -> None:
    assert compare(tmp_path) == ""


def test_skipped_steps_are_found(tmp_path: Path) -> None:
    assert compare(tmp_path, steps=STEPS - 1) == "rank 0 skipped steps"


def test_different_weights_are_found(tmp_path: Path) -> None:
    assert compare(tmp_path, weight=1.0 + 2**-23) == "weights differ: weight"


def test_a_seed_gives_the_same_shapes_again() -> None:
    first, again = (
        [Shape.choose(rng) for _ in range(20)] for rng in (random.Random("0 shapes"), random.Random("0 shapes"))
    )
    assert first == again
    assert len({(shape.nodes, shape.style) for shape in first}) > 3
