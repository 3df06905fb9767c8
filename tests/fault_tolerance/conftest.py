"""Disturbed trainings, and an undisturbed one to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.runs import Training

Make = Callable[..., Training]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The reference: two ranks, from the first step to the last."""
    training = Training(tmp_path_factory.mktemp("undisturbed"), "--nproc", "2")
    training.start()
    try:
        training.finish()
    finally:
        training.close()
    return training


@pytest.fixture
def training(tmp_path: Path, guard: None) -> Iterator[Make]:
    """Create a training that ends with its test."""
    made: list[Training] = []

    def make(*options: str, **keys: str) -> Training:
        made.append(Training(tmp_path / f"training-{len(made)}", *options, **keys))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
