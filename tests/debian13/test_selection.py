"""The tests that run on the newer Slurm exist under the names by which they are chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.debian13.test_debian13 import IN_CONTAINERS, ON_THE_NEWER_SLURM

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "args", [*ON_THE_NEWER_SLURM.values(), *IN_CONTAINERS.values()], ids=lambda args: args[0]
)
def test_chosen_tests_exist(args: list[str]) -> None:
    names = re.findall(
        r"^def (test_\w+)", (ROOT / args[0]).read_text(encoding="utf-8"), re.MULTILINE
    )
    for word in set(" ".join(args[2:]).split()) - {"or", "not"}:
        assert any(word in name for name in names), word
