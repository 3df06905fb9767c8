"""Means and peaks of node metrics."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.watch.node_usage import read_node_usage


def test_means_and_peaks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.system.mkdir()
    facts = {
        "time": 1,
        "host": "gpu1",
        "cores": 64,
        "memory_total": 512 << 30,
        "gpus": [{"name": "H200", "memory": 140 << 30}] * 2,
    }
    samples = [
        {
            "time": 2,
            "cpu": 40.0,
            "own_cpu": 8.0,
            "memory": 100 << 30,
            "own_memory": 60 << 30,
            "gpus": [
                {"busy": 90, "memory": 70 << 30, "power": 500.0},
                {"busy": 80, "memory": 60 << 30, "power": 600.0},
            ],
        },
        {
            "time": 3,
            "cpu": 60.0,
            "own_cpu": 12.0,
            "memory": 90 << 30,
            "own_memory": 50 << 30,
            "gpus": [{}, {}],
        },
    ]
    lines = [json.dumps(each) for each in (facts, *samples)]
    run.node_metrics(10).write_text("\n".join([*lines, '{"time": 4, "cpu": 9']))
    run.node_metrics(2).write_text(json.dumps({"time": 1, "host": "gpu0"}) + "\n")
    (run.system / "notes.jsonl").write_text("")
    assert [use.node for use in read_node_usage(run)] == [2, 10]
    assert [use.node for use in read_node_usage(run, max_nodes=1)] == [2]
    quiet, busy = read_node_usage(run)
    assert (quiet.host, quiet.mean("cpu"), quiet.peak("memory")) == ("gpu0", None, None)
    assert (busy.host, busy.mean("cpu"), busy.mean("own_cpu")) == ("gpu1", 50.0, 10.0)
    assert (busy.peak("memory"), busy.peak("own_memory")) == (100 << 30, 60 << 30)


def test_long_files_are_read_from_their_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.system.mkdir()
    line = json.dumps({"time": 2, "cpu": 1.0, "filler": "x" * 1000}) + "\n"
    text = (
        json.dumps({"host": "a", "cores": 2}) + "\n" + line * 3000 + json.dumps({"cpu": 3.0}) + "\n"
    )
    run.node_metrics(0).write_text(text)
    (use,) = read_node_usage(run)
    assert (use.host, use.peak("cpu")) == ("a", 3.0)
    assert 900 < len(use.samples) < 1100
