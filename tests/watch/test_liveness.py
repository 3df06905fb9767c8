"""A job that Slurm shows as running, but whose agents have stopped writing, is found; a quiet one is left alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.contract.stacks import NodeAnswer
from paceline.slurm.job_states import JobState
from paceline.watch.diagnosis import diagnose
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.records import Record, read_record
from paceline.watch.run_status import seconds_lifeless

HOUR = 3600.0


def make_run(path: Path, *, interval: float = 15.0) -> RunFolder:
    """A run of job 7 on two nodes, with everything that its agents write."""
    folder = RunFolder(path / "project" / "default" / "20260101-000000-aaaa")
    job_start, attempt = folder.job_start("7-0"), folder.attempt(1)
    for each in (folder.system, folder.events, job_start.path, attempt.path, folder.claims):
        each.mkdir(parents=True)
    (folder.claims / "1").symlink_to("7-0")
    folder.job.write_text("7\n")
    folder.run_json.write_text('{"nodes": 2, "nproc": 1}')
    folder.launch_spec.write_text(json.dumps({"system_metrics": interval}))
    files = (
        folder.node_metrics(0),
        folder.node_metrics(1),
        folder.events / "agent-0.jsonl",
        folder.slurm_log,
        folder.metrics,
        attempt.log(0),
        job_start.agent,
    )
    for each in files:
        each.write_text("{}\n")
    set_age(folder, HOUR)
    return folder


def set_age(folder: RunFolder, seconds: float, *names: str) -> None:
    """Let these files, or all of them, be this old."""
    moment = time.time() - seconds
    for path in [folder.path / name for name in names] or folder.path.rglob("*"):
        os.utime(path, (moment, moment), follow_symlinks=False)


def state(elapsed: str = "2:00:00", name: str = "RUNNING", job: str = "7") -> JobState:
    return JobState(job, name, nodes="node[1-2]", elapsed=elapsed)


def read(folder: RunFolder, job_state: JobState) -> Record:
    return read_record(folder, lambda jobs: {"7": job_state})


def test_a_dead_job_names_the_cause_and_the_remedy(tmp_path: Path) -> None:
    record = read(make_run(tmp_path), state())
    assert record.status == "running"
    assert record.detail == (
        "no sign of life from node[1-2] for 1h: a node may have restarted without Slurm noticing;"
        " use `scontrol requeue 7`"
    )
    assert "paceline doctor" in record.hint


def test_a_job_that_may_not_be_requeued_is_resumed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder.launch_spec.write_text('{"system_metrics": 15, "requeue": false}')
    assert read(folder, state()).detail.endswith(
        "use `scancel 7`, then `paceline submit --resume 20260101-000000-aaaa`"
    )


@pytest.mark.parametrize("verdict", ["done", "failed"])
def test_a_job_whose_end_slurm_has_missed_is_not_started_again(
    tmp_path: Path, verdict: str
) -> None:
    folder = make_run(tmp_path)
    folder.job_start("7-0").verdict.write_text(f"{verdict}\n")
    set_age(folder, HOUR)
    record = read(folder, state())
    said = f"no sign of life from node[1-2] for 1h: it is {verdict}, but Slurm has not noticed; use `scancel 7`"
    assert record.detail == said
    hint = diagnose(Evidence(record))[0].hint
    assert hint == "Use `scancel 7`."


SIGNS = [
    "system/node-1.jsonl",
    "events/agent-0.jsonl",
    "slurm.log",
    "metrics.jsonl",
    "attempt-1/rank-0.log",
    "job-starts/7-0/agent",
]


@pytest.mark.parametrize("sign", SIGNS)
def test_any_file_that_is_written_is_a_sign_of_life(tmp_path: Path, sign: str) -> None:
    folder = make_run(tmp_path)
    set_age(folder, 200, sign)
    record = read(folder, state())
    assert (record.seconds_lifeless, record.detail, record.hint) == (None, "node[1-2]", "")
    set_age(folder, 400, sign)
    assert read(folder, state()).seconds_lifeless == pytest.approx(400, abs=60)


def test_a_long_interval_needs_a_longer_silence(tmp_path: Path) -> None:
    """While a run trains in silence for an hour, only the samples show that it lives."""
    folder = make_run(tmp_path, interval=600.0)
    set_age(folder, 2000)
    assert read(folder, state()).seconds_lifeless is None
    set_age(folder, 2500)
    assert read(folder, state()).seconds_lifeless == pytest.approx(2500, abs=60)


@pytest.mark.parametrize(
    "job_state",
    [
        state(name="SUSPENDED"),
        state(name="COMPLETING"),
        state(name="PENDING"),
        state(job="8"),
        state("59:00"),  # the samples are those of an earlier start, and this one loads modules
        state(""),
        state("INVALID"),
    ],
)
def test_silence_that_slurm_explains(tmp_path: Path, job_state: JobState) -> None:
    assert seconds_lifeless(make_run(tmp_path), job_state) is None


@pytest.mark.parametrize(
    "reason",
    ["no samples yet", "no sampling", "no launch spec", "the next trial", "cancelled", "no claim"],
)
def test_silence_that_the_run_folder_explains(tmp_path: Path, reason: str) -> None:
    folder = make_run(tmp_path, interval=0.0 if reason == "no sampling" else 15.0)
    if reason == "no samples yet":
        for path in folder.system.iterdir():
            path.unlink()
    elif reason == "no launch spec":
        folder.launch_spec.write_text("{")
    elif reason == "the next trial":
        folder.launch_spec.write_text('{"system_metrics": 15.0, "trial": true}')
        folder.job_start("7-0").verdict.write_text("done\n")
    elif reason == "cancelled":
        folder.cancelled.touch()
    elif reason == "no claim":
        (folder.claims / "1").unlink()
    set_age(folder, HOUR)
    assert seconds_lifeless(folder, state()) is None


def test_the_doctor_says_the_same(tmp_path: Path) -> None:
    record = read(make_run(tmp_path), state())
    answers = [
        NodeAnswer("node1", {"ranks": []}),
        NodeAnswer("node2", problem="no answer within 20 s"),
    ]
    finding = diagnose(Evidence(record, answers))[0]
    assert (finding.about, finding.level) == ("job", "problem")
    assert finding.text == "Slurm shows job 7 as running, but node[1-2] gives no sign of life."
    assert "`scontrol requeue 7`" in finding.hint
    assert finding.evidence[1:] == (
        "node1: no rank of the run is there",
        "node2: no answer within 20 s",
    )


def test_the_doctor_does_not_restart_ranks_that_are_alive(tmp_path: Path) -> None:
    record = read(make_run(tmp_path), state())
    row = [0, 2, 5, 1.0, "S", 0.1, 0.0, 0.0]
    found = diagnose(Evidence(record, [NodeAnswer("node1", {"ranks": [row]})]))
    finding = next(each for each in found if each.about == "agents")
    assert finding.text == "The ranks on node1 are alive, but their agents write nothing."
    assert not any("requeue" in each.hint for each in found)
    row[4] = ""
    assert diagnose(Evidence(record, [NodeAnswer("node1", {"ranks": [row]})]))[0].about == "job"
