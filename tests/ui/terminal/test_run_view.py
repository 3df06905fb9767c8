"""A run in the terminal: its time, its failure, its curves and its nodes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.commands.show import show_run
from paceline.contract.run_folder import RunFolder
from paceline.watch.details import read_details
from paceline.watch.records import read_record

EVIL = "\x1b]0;owned\x07[bold]<script>"


def at(time: float, event: str, **fields: Any) -> str:
    return json.dumps({"time": 1_700_000_000 + time, "event": event, **fields}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A job that failed once, was requeued once, and failed again."""
    folder = RunFolder(tmp_path / "runs" / "project" / "default" / "20260101-120000-1a2b")
    for path in (folder.events, folder.system, folder.attempt(1).path, folder.attempt(2).path):
        path.mkdir(parents=True)
    folder.run_json.write_text(
        json.dumps({"name": EVIL, "nodes": 1, "nproc": 2, "command": ["paceline", "run", "a b"]})
    )
    (folder.events / "agent-0.jsonl").write_text(
        at(0, "queued")
        + at(60, "node", job_start="7-0", index=0)
        + at(70, "launch", attempt=1, ranks=[0])
        + at(400, "failed", attempt=1)
        + at(500, "node", job_start="7-1", index=0)
        + at(510, "launch", attempt=2, ranks=[0])
        + at(900, "failed", attempt=2)
    )
    (folder.events / "rank-0.jsonl").write_text(
        at(100, "training", step=0)
        + at(300, "saving", step=200, blocked=20)
        + at(520, "training", step=200)
    )
    for number in (1, 2):
        attempt = folder.attempt(number)
        attempt.verdict.write_text("failed\n")
        failure = {
            "rank": 1,
            "host": EVIL,
            "type": "ValueError",
            "message": f"bad {EVIL}",
            "where": "train.py:9",
        }
        attempt.failure.write_text(json.dumps(failure))
        lines = [f'  File "train.py", line {line}' for line in range(40)]
        trace = "\n".join(["Traceback (most recent call last):", *lines, f"ValueError: bad {EVIL}"])
        attempt.error(1).write_text(json.dumps({"traceback": trace}))
    with folder.metrics.open("w") as out:
        for step in range(300):
            record = {
                "step": step,
                "time": 1.7e9 + step,
                "seconds": 0.1,
                "loss": 3.0 / (step + 1),
                EVIL: step,
            }
            out.write(json.dumps(record) + "\n")
    node = {
        "time": 1,
        "host": f"n1{EVIL}",
        "cores": 4,
        "memory_total": 100,
        "gpus": [{"name": "H200", "memory": 10}] * 2,
    }
    sample = {
        "time": 2,
        "cpu": 50.0,
        "memory": 25,
        "gpus": [{"busy": 100, "memory": 5}, {"busy": 50, "memory": "x"}],
    }
    folder.node_metrics(0).write_text(f"{json.dumps(node)}\n{json.dumps(sample)}\n")
    return folder


def draw(folder: RunFolder, width: int, *, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    record = read_record(folder)
    show_run(
        record,
        read_details(record),
        Console(file=file, width=width, force_terminal=True, color_system=None),
    )
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("width", [80, 132])
def test_the_most_important_comes_first_and_fits(folder: RunFolder, width: int) -> None:
    text = draw(folder, width)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert all(len(line) <= width for line in lines if str(folder.path) not in line)
    order = [
        "status",
        "traceback",
        "command",
        "time line",
        "attempt 1",
        "goodput",
        "loss",
        "node 0",
    ]
    found = [
        next(number for number, line in enumerate(lines) if line.startswith(name)) for name in order
    ]
    assert found == sorted(found)
    assert len(lines) < 75


def test_the_time_line_shows_what_happened_when(folder: RunFolder) -> None:
    lines = draw(folder, 111).splitlines()
    [line] = [line[11:] for line in lines if line.startswith("time line")]
    # 900 s in 100 columns: queued, starting, training, saving, lost; queued again, starting, training.
    assert len(line) == 100
    assert [line[second // 9] for second in (30, 85, 200, 290, 350, 450, 515, 700)] == list(
        "░▒█▓x░▒█"
    )
    text = " ".join("\n".join(lines).split())
    assert "; 2 failures" in text
    assert "1 node x 2 ranks (? style)" in text
    assert "n1" in text
    assert "CPU ███░░░ 50% · memory ██░░░░ 25% · 2 GPUs ████░░ 75% GPU memory ███░░░ 50%" in text
    assert '... File "train.py", line 27' in text


def test_json_is_the_details(folder: RunFolder) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "show", str(folder.path), "--json"],
        capture_output=True,
        check=True,
    )
    details = read_details(read_record(folder)).to_json()
    assert json.loads(done.stdout) == json.loads(json.dumps({"format": 1, **details}))
