"""The example of Hugging Face's Trainer: it learns, saves just in time, and resumes to the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.examples.framework_ranks import run_hf_trainer
from tests.forked_ranks import Ranks

ARGS = ["--cpu", "--steps", "100"]


def test_it_saves_just_in_time_and_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = ([*ARGS, "--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    (tmp_path / "parts" / "checkpoint-70").mkdir(parents=True)  # incomplete
    stopped = ranks(run_hf_trainer, 2, [parts], 45, timeout=400)
    assert [code for ((code, _),) in stopped] == [75, 75]
    first, second = ranks(run_hf_trainer, 2, [parts, whole], timeout=400)
    (resumed, printed), (expected, _) = first
    assert resumed == expected == second[0][0] < 4.0, "14 words"
    assert "resumed at step 45\n" in printed
    ends = [load_file(tmp_path / name / "checkpoint-100" / "model.safetensors") for name in ("whole", "parts")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
