"""A run's row and its details, read from the folder of a real run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.ui.terminal.run_view import describe_attempt
from paceline.watch.details import read_details
from paceline.watch.overview import make_overview
from paceline.watch.records import find_runs, read_record
from tests.watch.test_overview import write_lines
from tests.watch.test_records import make_run

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
        [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--nproc",
            "1",
            "--cpu",
            "--name",
            "first",
            "train.py",
        ],
        cwd=tmp_path,
        check=not fail,
        capture_output=True,
    )


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
    assert sorted(details.commands) == (
        ["logs", "repeat", "resume"] if fail else ["logs", "repeat"]
    )
    assert details.commands["repeat"].startswith(f"cd {tmp_path} && ")
    assert details.commands["repeat"].endswith(details.command)
    assert details.timeline[0].began < details.timeline[-1].ended
    assert (attempt.began, attempt.ended) == (details.timeline[0].began, details.timeline[-1].ended)
    assert sum(details.goodput.seconds.values()) == pytest.approx(details.goodput.total)
    json.dumps(details.to_json(), allow_nan=False)


@pytest.mark.parametrize("cluster", ["alps", "my cluster", "", 7])
def test_commands_about_a_run_that_was_fetched_name_its_cluster(
    tmp_path: Path, cluster: object
) -> None:
    folder = make_run(tmp_path)
    typed = ["paceline", "submit", "--cpu", "train.py"]
    about = {
        "command": typed,
        "cwd": "/home/me/.cache/paceline/code/1",
        "slurm_conf": "/etc/alps.conf",
    }
    folder.run_json.write_text(json.dumps(about))
    folder.fetched.write_text(json.dumps({"cluster": cluster, "status": "running"}))
    details = read_details(read_record(folder, lambda jobs: {}))
    assert details.commands["logs"] == f"paceline logs {folder.key}"  # which is here
    if cluster == "alps":
        assert (
            details.commands["repeat"]
            == details.command
            == "paceline submit --on alps --cpu train.py"
        )
        assert details.commands["cancel"] == f"paceline cancel {folder.key} --on alps"
        assert details.overview.hint == f"To update it: paceline fetch {folder.key} --on alps"
    elif cluster == "my cluster":
        assert details.commands["cancel"].endswith("--on 'my cluster'")


def test_ranks_and_nodes_are_those_of_the_newest_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b" / "c")
    folder.system.mkdir(parents=True)
    folder.run_json.write_text('{"nodes": 2, "nproc": 1}')
    for node, own in ((0, 0.1), (1, 0.3)):
        lines = [{"time": 100, "host": f"n{node}", "cores": 4, "gpus": [{"name": "H200"}]}]
        for moment in range(500):
            row = [node, 2, moment, 0.5, "R", 0.3, 1.0, own]
            lines.append(
                {
                    "time": 101 + moment,
                    "cpu": float(moment),
                    "ranks": [row, ["x"], [9, 2, 1, math.nan]],
                }
            )
        text = "\n".join(map(json.dumps, lines))
        folder.node_metrics(node).write_text(f'{text}\n{{"time": 700, "cpu": NaN, "ranks": []')
    details = read_details(read_record(folder))
    assert [
        (rank.rank, rank.host, rank.step, rank.state, rank.is_slow) for rank in details.ranks
    ] == [(0, "n0", 499, "ended", False), (1, "n1", 499, "ended", True)]
    assert [len(node.samples) for node in details.nodes] == [167, 167]
    assert details.nodes[0].samples[-1] == {"time": 600, "cpu": 499.0}
    assert (details.nodes[1].cores, details.nodes[1].gpus) == (4, [{"name": "H200"}])
    json.dumps(details.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("verdict", "sample", "shown"),
    [
        ("done", [2, 72], ("finished", 80)),  # the last sample was taken before the end
        ("stopped", [2, 72], ("stopped", 80)),
        ("failed", [0, 0], ("ended", 80)),
        ("failed", [2, 72], ("ended", 72)),  # it may have hung there
    ],
)
def test_the_ranks_of_a_run_that_is_over_do_not_run(
    tmp_path: Path, verdict: str, sample: list[int], shown: tuple[str, int]
) -> None:
    folder = make_run(tmp_path, job=None, verdict=verdict)
    write_lines(folder.metrics, [{"step": 80, "time": 9.0, "loss": 1.0}])
    rows = [[0, *sample, 0.5, "R", 0.3, 1.0, 0.1]]
    write_lines(folder.node_metrics(0), [{"host": "n1", "time": 1.0}, {"time": 2.0, "ranks": rows}])
    [rank] = read_details(read_record(folder)).ranks
    assert (rank.state, rank.step) == shown


def test_a_script_without_the_runtime_runs_and_has_no_goodput(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    events = [
        {"time": 1.0, "event": "node", "job_start": "7-0", "index": 0},
        {"time": 2.0, "event": "launch", "attempt": 1, "ranks": [0]},
        {"time": 3.0, "event": "ranks", "attempt": 1, "ranks": [0], "uses_runtime": False},
    ]
    write_lines(folder.events / "agent-0.jsonl", events)
    rows = [[0, 0, 0, None, "R", 0.0, 0.0, 0.0]]
    write_lines(folder.node_metrics(0), [{"host": "n1", "time": 1.0}, {"time": 4.0, "ranks": rows}])
    details = read_details(read_record(folder, lambda jobs: {"7": JobState("7", "RUNNING")}))
    assert ([rank.state for rank in details.ranks], details.overview.goodput) == (["running"], None)


def test_an_attempt_says_why_it_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="stopped")
    events: list[dict[str, Any]] = []
    for number, by in ((1, "time limit in about 60 s"), (2, "SIGTERM: preemption or scancel")):
        began = number * 100.0
        events += [
            {"time": began, "event": "node", "job_start": f"7-{number - 1}", "index": 0},
            {"time": began + 1, "event": "launch", "attempt": number, "ranks": [0]},
            {"time": began + 2, "event": "stop_requested", "by": by},
            {"time": began + 3, "event": "stop_requested", "by": "again"},
            {"time": began + 11, "event": "stopped", "attempt": number},
        ]
        folder.attempt(number).path.mkdir()
        folder.attempt(number).verdict.write_text("stopped\n")
    write_lines(folder.events / "agent-0.jsonl", events)
    details = read_details(read_record(folder, lambda jobs: {}))
    assert [describe_attempt(attempt) for attempt in details.attempts] == [
        "stopped after 11 s: time limit in about 60 s",
        "stopped after 11 s: SIGTERM: preemption or scancel",
    ]
