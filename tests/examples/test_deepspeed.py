"""The example of DeepSpeed: two ranks learn, exit with 75 when they are stopped, and resume to the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.ranks import run_plain
from tests.forked_ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install deepspeed",
)


def load(folder: Path) -> dict[str, Any]:
    newest = folder / (folder / "latest").read_text()
    loaded: dict[str, Any] = torch.load(newest / "mp_rank_00_model_states.pt", weights_only=False)
    return loaded


def test_two_ranks_learn_stop_together_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ["--samples", "1280"]  # 20 steps in each of 5 epochs
    first, second = ranks(run_plain, 2, "deepspeed", [*args, "--folder", str(whole)], timeout=300)
    assert first[0] == second[0] > 0.9
    stopped = ranks(run_plain, 2, "deepspeed", [*args, "--folder", str(parts)], 30, timeout=300)
    assert [code for code, _ in stopped] == [75, 75]
    assert load(parts)["global_steps"] == 30
    again = ranks(run_plain, 2, "deepspeed", [*args, "--folder", str(parts)], timeout=300)
    assert "resumed at step 30" in again[0][1]
    assert again[0][0] == first[0]
    expected, found = load(whole), load(parts)
    assert found["global_steps"] == expected["global_steps"] == 100
    for name, tensor in expected["module"].items():
        assert torch.equal(found["module"][name], tensor), name
