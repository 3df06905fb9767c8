"""The example of plain DDP: it learns, exits with 75 when it is stopped, and resumes to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.examples.ranks import EXAMPLES, run_plain
from tests.forked_ranks import Ranks


def load(folder: Path) -> dict[str, Any]:
    assert [path.name for path in folder.iterdir()] == ["checkpoint.pt"], "nothing partial is left"
    loaded: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return loaded


def test_two_ranks_learn_stop_together_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ["--samples", "1920", "--epochs", "5"]  # 30 steps each
    first, second = ranks(run_plain, 2, "bare", [*args, "--folder", str(whole)])
    assert first[0] == second[0] > 0.9
    assert "final test accuracy" in first[1]
    assert second[1] == ""
    stopped = ranks(run_plain, 2, "bare", [*args, "--folder", str(parts)], 40)
    assert [code for code, _ in stopped] == [75, 75]
    assert load(parts)["step"] == 40
    again = ranks(run_plain, 2, "bare", [*args, "--folder", str(parts)])
    assert again[0][0] == first[0]
    assert again[0][1].startswith("resumed at step 40\nepoch 2: ")
    expected, found = load(whole), load(parts)
    assert found["step"] == expected["step"] == 150
    assert found["net"].keys() == expected["net"].keys()
    for name, tensor in expected["net"].items():
        assert torch.equal(found["net"][name], tensor), name


def test_it_does_not_know_paceline() -> None:
    assert "import paceline" not in (EXAMPLES / "bare" / "train.py").read_text(encoding="utf-8")
