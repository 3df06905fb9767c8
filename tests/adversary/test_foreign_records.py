"""Files of other users, other versions and crashed programs: each costs a row or an error, never more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

from paceline.agent.sweep_trial import main as trial_main
from paceline.cli.commands import ps, show
from paceline.cli.commands import sweep as sweeps
from paceline.contract.fitness import Measurement
from paceline.contract.foreign_records import (
    keep_valid,
    make,
    parse_object,
    read_bounded,
    read_objects,
)
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import PacelineError
from paceline.launch.resume import read_launch_spec
from paceline.slurm.commands import read_job_id
from paceline.slurm.job_states import JobState
from paceline.watch.details import make_node, read_details
from paceline.watch.diagnosis import diagnose
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.events import read_events
from paceline.watch.goodput import compute_goodput
from paceline.watch.node_usage import read_node_usage
from paceline.watch.records import RUN_FIELDS, read_record
from tests.watch.diagnosis.recorded_run import RecordedRun

pytestmark = pytest.mark.timeout(60)  # a pipe or an endless file would take for ever

VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e308",
    "9" * 300,
    "9" * 5000,
    "-1",
    "0",
    "null",
    "true",
    "[]",
    "{}",
    '""',
    '"x"',
    '"\\ud800"',
    '"\\u001b]0;owned\\u0007\\u001b[2J"',
    '"../../../etc"',
    '"[bold]x"',
    "[[[[1]]]]",
    '[{"a": [null]}]',
    '{"a": {"b": {"c": 1}}}',
    '["\\u0000"]',
    "[1, 2]",
    '{"1": [1, "x", null]}',
    '{"1": 5}',
]
WHOLE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"5",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"{}" * 1000,
    b"\0" * 1000,
    b'{"created": ' + b"9" * 100_000 + b"}",
]


def hostile(keys: tuple[str, ...], good: dict[str, object]) -> Iterator[bytes]:
    """Yield contents that are wrong as a whole, then good ones in which one value is replaced."""
    yield from WHOLE
    for key in keys:
        for value in VALUES:
            others = {name: each for name, each in good.items() if name != key}
            yield (
                json.dumps(others)[:-1].encode()
                + f"{', ' if others else ''}{json.dumps(key)}: {value}}}".encode()
            )


def obstruct(path: Path) -> Iterator[None]:
    """Put things that are no files into a file's place."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    yield
    path.unlink()
    for target in ("/dev/zero", "/dev/tty", str(path), "/nowhere"):
        path.symlink_to(target)
        yield
        path.unlink()
    path.mkdir()
    yield
    path.rmdir()


RUN = {
    "run_id": "r",
    "name": "n",
    "created": 1.7e9,
    "program": "train.py",
    "command": ["paceline", "run"],
    "nodes": 2,
    "nproc": 2,
    "style": "fork",
    "host": "h",
    "code": {"commit": "abc", "folder": "/p"},
    "spec": {},
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run of somebody, beside an ordinary one."""
    for name in ("theirs", "ours"):
        folder = RunFolder(tmp_path / "scratch" / "project" / "base" / name)
        for path in (
            folder.path / "job-starts" / "pid-1-x",
            folder.events,
            folder.system,
            folder.claims,
        ):
            path.mkdir(parents=True)
        (folder.claims / "1").symlink_to("pid-1-x")
        folder.run_json.write_text(json.dumps({**RUN, "name": name}))
        (folder.path / "job-starts" / "pid-1-x" / "verdict").write_text("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PACELINE_SCRATCH", str(tmp_path / "scratch"))
        patch.setenv("COLUMNS", "200")
        yield RunFolder(tmp_path / "scratch" / "project" / "base" / "theirs")


def check_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """List all runs and show the one in question; the ordinary run keeps its row."""
    assert ps.command() == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("ours ") and "done" in line], (
        shown
    )
    with suppress(PacelineError):  # a clear error is fine
        show.command("theirs")
    shown += capsys.readouterr().out
    assert not [each for each in shown if each not in "\n\t" and not each.isprintable()]


def test_a_hostile_run_json_costs_one_row(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in hostile(tuple(RUN), RUN):
        run.run_json.write_bytes(content)
        check_shown(capsys)
    for _ in obstruct(run.run_json):
        check_shown(capsys)


@pytest.mark.parametrize(
    "name",
    [
        "job",
        "metrics.jsonl",
        "events/agent-0.jsonl",
        "system/node-0.jsonl",
        "attempt-1/failure.json",
        "attempt-1/verdict",
        "job-starts/pid-1-x/verdict",
        "job-starts/pid-1-x/process",
        "claims/1",
    ],
)
def test_other_hostile_files_of_a_run_cost_one_row(
    run: RunFolder, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    for content in WHOLE:
        path.write_bytes(content)
        check_shown(capsys)
    for _ in obstruct(path):
        check_shown(capsys)


def test_hostile_events_count_for_nothing(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = (
        "queued",
        "node",
        "started",
        "launch",
        "ranks",
        "training",
        "first_step",
        "saving",
        "failed",
        "done",
        "independent",
        "files",
        "framework",
        "save_failed",
        "total_steps",
    )
    keys = (
        "time",
        "event",
        "step",
        "steps",
        "blocked",
        "waited",
        "seconds",
        "job_start",
        "nodelist",
        "index",
        "ranks",
        "attempt",
        "processes",
        "names",
        "uses_runtime",
        "reason",
        "name",
        "error",
    )
    lines = []
    for number, kind in enumerate(kinds):
        good = {
            "time": 1.7e9 + number,
            "event": kind,
            "step": 1,
            "blocked": 1.0,
            "job_start": "1-0",
            "names": ["a"],
            "seconds": {"setup": 1.0, "first_step": 2.0},
            "waited": 1.0,
            "ranks": [0],
            "attempt": 1,
        }
        lines += list(hostile(keys, good))
    (run.events / "agent-0.jsonl").write_bytes(b"\n".join(lines))
    shares = compute_goodput(read_events(run.events), 1.8e9)
    assert 0 <= shares.total < 1e12
    record = read_record(run)
    json.dumps(read_details(record).to_json(), allow_nan=False)
    show.command(str(run.path))
    shown = capsys.readouterr().out
    assert shown.startswith("run ")
    assert not [each for each in shown if each not in "\n\t" and not each.isprintable()]


def test_hostile_samples_count_for_nothing(run: RunFolder) -> None:
    good = {
        "host": "n1",
        "cores": 8,
        "memory_total": 2**34,
        "gpus": [{"name": "A100", "memory": 2**35}],
    }
    sample = {
        "time": 1.0,
        "cpu": 50.0,
        "own_cpu": 1.0,
        "memory": 2**30,
        "own_memory": 1,
        "gpus": [{"busy": 5}],
    }
    for lines in (hostile(tuple(good), good), hostile(tuple(sample), sample)):
        for line in lines:
            (run.system / "node-0.jsonl").write_bytes(json.dumps(good).encode() + b"\n" + line)
            usage = read_node_usage(run)
            assert make_node(usage[0]).samples is not None
            found = [use.mean(key) for key in sample for use in usage] + [
                use.peak(key) for key in sample for use in usage
            ]
            assert all(-1e18 < each < 1e18 for each in found if each is not None)


def test_a_hostile_launch_spec_is_one_error(run: RunFolder) -> None:
    good = json.loads(LaunchSpec("r", "train.py", []).to_json())
    for content in hostile(tuple(good), good):
        run.launch_spec.write_bytes(content)
        with suppress(PacelineError):
            spec = read_launch_spec(run)
            assert isinstance(spec.program, str)
            assert all(isinstance(arg, str) for arg in spec.args)
    for _ in obstruct(run.launch_spec):
        with pytest.raises(PacelineError):
            read_launch_spec(run)


def test_a_job_id_is_a_job_id(run: RunFolder) -> None:
    """It becomes an argument of Slurm's commands."""
    for text in ("--all", "1;2", "1,2", "1 2", "-1", "x", "", "9" * 1000):
        run.job.write_text(text)
        assert read_job_id(run) is None
    run.job.write_text("12_3\n")
    assert read_job_id(run) == "12_3"


SWEEP_FILES: dict[str, dict[str, object]] = {
    "sweep.json": {
        "name": "s",
        "metric": "loss",
        "direction": "minimize",
        "space": {"lr": {"grid": [1]}},
        "args": [],
    },
    "points.jsonl": {
        "number": 0,
        "group": 0,
        "point": {"lr": 1},
        "seed": 1,
        "program": "a.py",
        "args": ["--lr", "1"],
    },
    "jobs.jsonl": {"time": 1.0, "job": "5", "submission": "1", "tasks": {"0": [0]}},
    "trials/0/trial.json": {
        "number": 0,
        "group": 0,
        "point": {"lr": 1},
        "seed": None,
        "optuna": None,
    },
    "trials/0/result.json": {
        "state": "done",
        "value": 1.0,
        "step": 1,
        "started": 1.0,
        "ended": 2.0,
        "error": "",
        "point": {"lr": 1},
        "seed": None,
    },
}


@pytest.mark.parametrize("name", SWEEP_FILES)
def test_hostile_files_of_a_sweep_cost_one_error(
    run: RunFolder, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.slurm.squeue_and_sacct.states", lambda jobs: {})
    sweep = SweepFolder(run.path.parent / "sweep")
    sweep.trial(0).path.mkdir(parents=True)
    for each, good in SWEEP_FILES.items():
        (sweep.path / each).write_text(json.dumps(good) + "\n")

    def look() -> None:
        with suppress(PacelineError):
            sweeps.show("sweep")
        with suppress(PacelineError):
            sweep.read_points()
            sweep.read_search()
        shown = capsys.readouterr().out
        assert not [each for each in shown if each not in "\n\t" and not each.isprintable()]

    for content in hostile(tuple(SWEEP_FILES[name]), SWEEP_FILES[name]):
        (sweep.path / name).write_bytes(content + b"\n")
        look()
    for _ in obstruct(sweep.path / name):
        look()


def test_a_hostile_point_does_not_start_a_trial(run: RunFolder) -> None:
    sweep = SweepFolder(run.path.parent / "sweep")
    submission = sweep.submission(1)
    submission.mkdir(parents=True)
    sweep.spec.write_text('{"name": "s"}')
    (submission / "launch.json").write_text(LaunchSpec("r", "train.py", []).to_json())
    (submission / "run.json").write_text("{}")
    good = {"number": 0, "group": 0, "point": {"lr": 1}}
    for content in hostile(("group", "point", "seed", "args", "program"), good):
        sweep.points.write_bytes(content + b"\n")
        assert trial_main(["open", str(sweep.path), str(submission), "0"]) in (0, 1)


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(1 << 34)  # a hole: 16 GB that take no space
    with pytest.raises(ValueError, match="more than"):
        read_bounded(path)
    assert list(read_objects(path, limit=1 << 20)) == []


def test_parsed_values_are_checked() -> None:
    assert keep_valid({"created": float("nan"), "nodes": True, "other": 1}, RUN_FIELDS) == {
        "other": 1
    }
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_object("[" * 100_000)
    with pytest.raises(ValueError, match="args should be"):
        make(LaunchSpec, {"run_id": "r", "program": "p", "args": [1]})
    with pytest.raises(ValueError, match="no program"):
        make(LaunchSpec, {"run_id": "r", "args": []})


def test_good_records_are_kept(run: RunFolder) -> None:
    """The tests above would pass if nothing were."""
    assert read_record(run).details == {**RUN, "name": "theirs"}


def test_hostile_records_do_not_stop_the_doctor(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "run", gpus=1)
    recorded.samples(
        header={"gpus": [{"name": "A100", "memory": 1}]},
        node1={"gpus": [{"xid": 79}], "throttled": 90.0},
    )
    recorded.event(
        1,
        "unreachable",
        address="node1:3",
        error="x",
        resolved=["10.0.0.1"],
        interface="eth0",
        answers=True,
    )
    recorded.event(1, "lost", closed=False)
    recorded.findings()
    folder = recorded.folder
    failure = {
        "cause": "lost",
        "host": "node2",
        "rank": 1,
        "code": 1,
        "type": "E",
        "message": "m",
        "last_line": "l",
        "traceback": "t",
        "where": "w",
        "log": "/x",
        "step": 1,
        "time": 1.0,
    }
    fitness = {
        "time": 1.0,
        "ranks": [asdict(Measurement(0, "node1", 0, "cpu"))],
        "found": [{"host": "node1", "text": "slow", "unfit": True, "evidence": ["a"]}],
    }
    saves = {"event": "save_failed", "time": 1.0, "step": 1, "error": "No space left on device"}
    sample = json.loads(folder.node_metrics(0).read_text().splitlines()[-1])
    records = [
        (folder.attempt(1).failure, failure, False),
        (folder.fitness, fitness, False),
        (folder.events / "rank-0.jsonl", saves, False),
        (folder.node_metrics(0), sample, True),
        (folder.metrics, {"stragglers": {"1": 2.0}, "time": 2e9}, False),
    ]
    records += [
        (folder.events / f"agent-{index}.jsonl", event, True)
        for index, event in enumerate_events(recorded)
    ]
    for path, good, appends in records:
        before = path.read_bytes() if path.exists() else None
        for line in islice(hostile(tuple(good), good), None, None, 7):  # all of them take long
            path.write_bytes((before if appends and before else b"") + line + b"\n")
            state = JobState("7", "FAILED", "", "node[1-2]")
            record = read_record(folder, lambda jobs, state=state: {"7": state})
            assert diagnose(Evidence(record))
        path.unlink() if before is None else path.write_bytes(before)


def enumerate_events(recorded: RecordedRun) -> list[tuple[int, dict[str, object]]]:
    """Return one event of each kind, with the agent that writes it."""
    found = {
        event["event"]: (index, event)
        for index, events in recorded.events.items()
        for event in events
    }
    return list(found.values())
