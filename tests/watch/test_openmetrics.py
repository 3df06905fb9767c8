"""OpenMetrics text, read by Prometheus' own parsers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from paceline import cli
from paceline.contract.run_folder import RunFolder
from paceline.watch.details import read_details, write_openmetrics
from paceline.watch.metrics import read_last_values
from paceline.watch.records import read_record

EVIL = 'a "quoted" \\ back\nline \x1b[31m'


def at(time: float, event: str, **fields: Any) -> str:
    return json.dumps({"time": 1_700_000_000 + time, "event": event, **fields}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "project" / "default" / "20260101-120000-1a2b")
    folder.events.mkdir(parents=True)
    folder.run_json.write_text(json.dumps({"name": EVIL, "project": "p", "nodes": 1, "nproc": 2}))
    folder.attempt(1).path.mkdir()
    (folder.events / "agent-0.jsonl").write_text(
        at(0, "node", job_start="7-0", index=0)
        + at(10, "launch", attempt=1, ranks=[0])
        + at(20, "training", step=0)
        + at(100, "failed", attempt=1)
    )
    lines = [
        {"step": 1, "time": 1.0, "accuracy": 0.5},
        {"step": 2, "time": 2.0, "loss": math.nan, EVIL: 3, "note": "x"},
    ]
    folder.metrics.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo'
    )
    return folder


def write(*folders: RunFolder) -> str:
    return write_openmetrics(
        (read_details(read_record(each)), read_last_values(each.metrics)) for each in folders
    )


def test_both_parsers_of_prometheus_read_it(folder: RunFolder) -> None:
    text = write(folder, folder)  # two runs: the samples of a family stand together
    assert text.endswith("\n# EOF\n")
    assert "\x1b" not in text
    families = {family.name: family for family in parse_openmetrics(write(folder))}
    assert {name: family.type for name, family in families.items()}[
        "paceline_run_failures"
    ] == "counter"
    assert families["paceline_run_time_seconds"].unit == "seconds"
    [info] = families["paceline_run_info"].samples
    assert info.labels["name"] == EVIL.replace("\x1b", "\ufffd")
    assert info.labels["run"] == "20260101-120000-1a2b"
    values = {each.labels["metric"]: each.value for each in families["paceline_run_metric"].samples}
    assert values["accuracy"] == 0.5
    assert math.isnan(values["loss"])
    assert values[EVIL.replace("\x1b", "\ufffd")] == 3
    times = families["paceline_run_time_seconds"].samples
    assert sum(each.value for each in times) == pytest.approx(100)
    assert {(each.labels["category"], each.labels["part"]): each.value for each in times}[
        "starting", "agents"
    ] == 10
    older = {sample.name for family in parse_prometheus(text) for sample in family.samples}
    assert {
        "paceline_run_info",
        "paceline_run_failures_total",
        "paceline_run_attempts_total",
    } <= older


def test_a_file_is_replaced_as_a_whole(folder: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "paceline.prom"
    target.write_text("old")
    assert cli.dispatch(["show", str(folder.path), "--openmetrics", "-o", str(target)]) == 0
    assert target.read_text() == write(folder)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_command_prints_it(folder: RunFolder) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "show", "--openmetrics", str(folder.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == write(folder)
