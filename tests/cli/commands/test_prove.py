"""`paceline prove` as typed: real runs of a script, the table, the report and the exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import dispatch
from paceline.errors import UsageError
from tests.conftest import Completed

SCRIPTS = Path(__file__).parents[2] / "tools" / "prove"


def test_a_proof_of_a_plain_script(
    paceline: Callable[..., Completed], tmp_path: Path, scratch: Path
) -> None:
    done = paceline(
        "prove",
        "--ranks",
        "1,2",
        "--styles",
        "fork",
        "--steps",
        "4",
        "--batch-arg",
        "--batch-size",
        str(SCRIPTS / "ddp.py"),
        "--batch-size",
        "16",
    )
    assert done.returncode == 0, done.stderr
    assert "The training is the same" in done.stdout
    assert "run 2: 2 ranks" in done.stderr, "a plain script is not interrupted"
    (folder,) = (scratch / tmp_path.name / "proofs").iterdir()
    found = json.loads((folder / "proof.json").read_text())
    assert found["holds"]
    assert found["comparisons"][0]["loss"] < 1e-6
    assert len(found["losses"]["2 ranks"]) == 4
    assert not list(folder.rglob("weights.pt"))


@pytest.mark.slow
def test_a_run_does_not_see_the_files_of_another(
    paceline: Callable[..., Completed], tmp_path: Path, scratch: Path
) -> None:
    """The script goes on with the checkpoint that it finds in its working directory, and reads a file there."""
    shutil.copy(SCRIPTS / "loop.py", tmp_path / "train.py")
    (tmp_path / "data.txt").write_text("1 2 3\n")
    arguments = ("train.py", "--checkpoint", "state.pt", "--data", "data.txt")
    done = paceline("prove", "--ranks", "1,2", "--steps", "3", "--styles", "fork", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "state.pt").exists()
    assert len(list((scratch / tmp_path.name / "proofs").rglob("state.pt"))) == 2


def test_a_script_that_fails_is_shown_with_its_error(paceline: Callable[..., Completed]) -> None:
    done = paceline("prove", str(SCRIPTS / "ddp.py"), "--mistake", "fails")
    assert done.returncode == 1
    assert "The script failed with 1 rank" in done.stderr
    assert "RuntimeError: no such data" in done.stderr


def test_a_wrong_style_leaves_no_folder(paceline: Callable[..., Completed], scratch: Path) -> None:
    done = paceline("prove", "--styles", "fork,frok", str(SCRIPTS / "loop.py"))
    assert done.returncode == 2
    assert (
        'Invalid --styles "frok": use some of fork, torchrun, spawn, lightning, accelerate.'
        in done.stderr
    )
    assert not scratch.exists()


def test_an_interrupted_proof_says_so_and_leaves_nothing_running(
    tmp_path: Path, scratch: Path
) -> None:
    """The guard of the tests looks for processes that are left."""
    command = ["prove", "--ranks", "2,1", "--steps", "1000000", str(SCRIPTS / "loop.py")]
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch), "COLUMNS": "200"}
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", *command],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not any(scratch.rglob("rank-1.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "interrupted, so there is no result" in printed
    assert not list(scratch.rglob("weights.pt"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "1,x"], "Invalid --ranks"),
        (["--ranks", "2,2"], "different numbers"),
        (["--without", "noise"], 'Invalid --without "noise"'),
        (["--batch-arg", "--bs"], "names --bs, but the script's arguments do not contain it"),
        (["--batch-arg", "--batch-size", "--ranks", "1,3"], "3 ranks cannot share a batch of 16"),
        (["--steps", "1"], "too few"),
    ],
)
def test_what_cannot_be_proved_is_said_before_anything_runs(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dispatch(["prove", *args, str(SCRIPTS / "ddp.py"), "--batch-size", "16"])
