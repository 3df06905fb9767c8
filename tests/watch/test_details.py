"""A run's row and its details, read from the folder of a real run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.watch.details import read_details
from paceline.watch.overview import make_overview
from paceline.watch.records import find_runs, read_record

SCRIPT = """
import paceline
with paceline.session() as run:
    for step in run.steps(range(5)):
        run.log(loss=1.0 / (step + 1))
    if FAIL:
        raise ValueError("the data is empty")
"""


def run_script(tmp_path: Path, *, fail: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("FAIL", str(fail)))
    subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "1", "--cpu", "--name", "first", "train.py"],
        cwd=tmp_path, check=not fail, capture_output=True,
    )  # fmt: skip


@pytest.mark.parametrize("fail", [False, True])
def test_row_and_details_of_a_run(tmp_path: Path, fail: bool) -> None:
    run_script(tmp_path, fail=fail)
    [folder] = find_runs(tmp_path / "runs")
    record = read_record(folder)
    row = make_overview(record)
    assert (row.name, row.status, row.is_over) == ("first", "failed" if fail else "done", True)
    assert (row.nodes, row.nproc, row.job, row.step) == (1, 1, "", 5)
    assert (row.loss_name, row.loss) == ("loss", pytest.approx(0.2))
    assert row.goodput is not None
    details = read_details(record)
    assert details.overview.run_id == row.run_id
    assert details.command.endswith("train.py")
    [attempt] = details.attempts
    assert attempt.verdict == row.status
    if fail:
        assert attempt.failure is not None
        assert attempt.failure.rank == 0
        assert "the data is empty" in attempt.failure.text
        assert "Traceback" in attempt.failure.traceback
    assert details.failure == attempt.failure
    assert sorted(details.commands) == (["logs", "repeat", "resume"] if fail else ["logs", "repeat"])
    assert details.commands["repeat"].startswith(f"cd {tmp_path} && ")
    assert details.commands["repeat"].endswith(details.command)
    assert details.timeline[0].began < details.timeline[-1].ended
    assert (attempt.began, attempt.ended) == (details.timeline[0].began, details.timeline[-1].ended)
    [start] = details.job_starts
    assert (start.job, start.verdict, start.began) == ("", row.status, attempt.began)
    assert sum(details.goodput.seconds.values()) == pytest.approx(details.goodput.total)
    json.dumps(details.to_json(), allow_nan=False)


def test_ranks_and_nodes_are_those_of_the_newest_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b" / "c")
    folder.system.mkdir(parents=True)
    folder.run_json.write_text('{"nodes": 2, "nproc": 1}')
    for node, own in ((0, 0.1), (1, 0.3)):
        lines = [{"time": 100, "host": f"n{node}", "cores": 4, "gpus": [{"name": "H200"}]}]
        for moment in range(500):
            row = [node, 2, moment, 0.5, "R", 0.3, 1.0, own]
            lines.append({"time": 101 + moment, "cpu": float(moment), "ranks": [row, ["x"], [9, 2, 1, math.nan]]})
        text = "\n".join(map(json.dumps, lines))
        folder.node_metrics(node).write_text(f'{text}\n{{"time": 700, "cpu": NaN, "ranks": []')
    details = read_details(read_record(folder))
    assert [(rank.rank, rank.host, rank.step, rank.state, rank.is_slow) for rank in details.ranks] == [
        (0, "n0", 499, "running", False), (1, "n1", 499, "running", True)
    ]  # fmt: skip
    assert [len(node.samples) for node in details.nodes] == [167, 167]
    assert details.nodes[0].samples[-1] == {"time": 600, "cpu": 499.0}
    assert (details.nodes[1].cores, details.nodes[1].gpus) == (4, [{"name": "H200"}])
    json.dumps(details.to_json(), allow_nan=False)
