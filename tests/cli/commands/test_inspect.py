"""`paceline inspect data` as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = """\
import sys, torch, paceline
assert sys.argv[1:] == ["--size", "8"] and __name__ == "__main__"
with paceline.session(seed=0) as run:
    loader = run.loader((torch.arange(33.0),), batch_size=8)
    for epoch in run.epochs(1):
        for (x,) in run.steps(loader):
            open("trained", "w").close()
"""


def test_a_script_is_inspected_without_training(
    paceline: Paceline, tmp_path: Path, scratch: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = paceline("inspect", "data", "--nproc", "2", "train.py", "--size", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run.loader of tuple: 33 samples, batch size 8 of all ranks, 2 ranks" in done.stdout
    assert (
        "32 samples once, none twice; 1 don't fill a last batch, different ones in each epoch"
        in done.stdout
    )
    assert "differs between epochs" in done.stdout
    assert not (tmp_path / "trained").exists()
    assert not list(scratch.glob("*/*/*/run.json")), "nothing to keep, nothing in `paceline ps`"


def test_errors_are_clear(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('boom')\n")
    done = paceline("inspect", "data", "--cpu", "--nproc", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "The script failed before it read any data." in done.stderr
    assert "ValueError: boom" in done.stderr


def test_json_and_a_script_without_loaders(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing to do')\n")
    done = paceline("inspect", "data", "--nproc", "1", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "neither run.loader nor a DataLoader" in done.stderr
    plain = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "for _ in range(2): list(DataLoader(list(range(6)), batch_size=2))\n"
    )
    (tmp_path / "train.py").write_text(plain)
    done = paceline(
        "inspect", "data", "--nproc", "1", "--limit", "2", "--json", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [batch["keys"] for batch in told["ranks"][0]["batches"]] == [[0, 1], [2, 3]] * 2
    assert told["ranks"][0]["facts"]["samples"] == 6


ENDLESS = """\
import itertools, torch, paceline
from torch.utils.data import IterableDataset
class Endless(IterableDataset):
    def __iter__(self): return iter(itertools.count())
with paceline.session(seed=0) as run:
    for x in run.steps(run.loader(Endless(), batch_size=4)):
        pass
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_one_signal_ends_it_although_no_step_ends(number: int, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "paceline", "inspect", "data", "--nproc", "1", "endless.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    )
    try:
        while not any(
            path.stat().st_size > 500 for path in tmp_path.glob("temporary/*/samples/rank-0.jsonl")
        ):
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=120) == 130
    finally:
        process.kill()
    assert not list((tmp_path / "temporary").iterdir())
