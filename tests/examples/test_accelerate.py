"""The example of Accelerate: it learns, stops in the middle, and resumes to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.framework_ranks import run_framework
from tests.forked_ranks import Ranks

ARGS = ["--samples", "960", "--epochs", "6"]  # 15 steps each
ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # as Paceline sets it


@pytest.mark.slow  # test_bare.py resumes a loop without the runtime
def test_it_saves_and_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = ([*ARGS, "--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    stopped = ranks(run_framework, 2, "accelerate", "train", [parts], 40, env=ON_CPU, timeout=300)
    assert [code for ((code, _),) in stopped] == [75, 75]
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["step-40"], (
        "nothing partial is left"
    )
    resumed, other = (
        ranks(run_framework, 2, "accelerate", "train", [each], env=ON_CPU, timeout=300)
        for each in (parts, whole)
    )
    ((accuracy, printed),) = resumed[0]
    assert accuracy == other[0][0][0] > 0.9
    assert printed.startswith("resumed at step 40\nepoch 3: ")
    assert resumed[1][0][1] == ""
    ends = [
        load_file(tmp_path / name / "step-90" / "model.safetensors") for name in ("whole", "parts")
    ]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
