"""The example of Hugging Face's Trainer: it learns, saves just in time, and resumes to the same weights."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.contract.run_folder import RunFolder
from paceline.watch.records import read_record
from tests.examples.framework_ranks import run_hf_trainer
from tests.forked_ranks import Ranks

ARGS = ["--cpu", "--steps", "100"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer"


@pytest.mark.slow  # test_lightning.py stops another trainer
def test_it_saves_just_in_time_and_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = ([*ARGS, "--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    (tmp_path / "parts" / "checkpoint-70").mkdir(parents=True)  # incomplete
    stopped = ranks(run_hf_trainer, 2, [parts], 45, timeout=400)
    assert [code for ((code, _),) in stopped] == [75, 75]
    first, second = ranks(run_hf_trainer, 2, [parts, whole], timeout=400)
    (resumed, printed), (expected, _) = first
    assert resumed == expected == second[0][0] < 4.0, "14 words"
    assert "resumed at step 45\n" in printed
    ends = [
        load_file(tmp_path / name / "checkpoint-100" / "model.safetensors")
        for name in ("whole", "parts")
    ]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow  # tests/guests/test_frameworks.py and the test above stop other trainers
def test_after_ctrl_c_in_a_terminal_all_ranks_save_in_the_same_step(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(EXAMPLE)
        words = [
            "run",
            "--scratch",
            str(tmp_path),
            "--cpu",
            "--nproc",
            "2",
            "train.py",
            "--cpu",
            "--steps",
            "100000",
        ]
        os.execv(sys.executable, [sys.executable, "-m", "paceline", *words])
    text = ""
    while data := read_terminal(terminal):
        text += data
        if "'loss'" in text and "^C" not in text:
            os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, text
    os.close(terminal)
    (path,) = tmp_path.glob("*/*/*/run.json")
    folder = RunFolder(path.parent)
    assert read_record(folder).status == "stopped", text
    steps = sorted(int(each.name.partition("-")[2]) for each in folder.checkpoints.iterdir())
    newest = folder.checkpoints / f"checkpoint-{steps[-1]}"
    assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == steps[-1]
    assert all((newest / f"rng_state_{rank}.pth").exists() for rank in (0, 1)), text
    assert all(step % 100 == 0 for step in steps[:-1]), steps
    assert not (newest / "checkpoint-is-incomplete.txt").exists()


def read_terminal(terminal: int) -> str:
    """Return what is printed next; nothing once the other end is closed."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""
