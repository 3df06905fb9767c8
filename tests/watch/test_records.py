"""Records of runs: their status by run folder and scheduler."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.contract.claims import describe_processes
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import JobState
from paceline.watch.overview import make_overview
from paceline.watch.records import find_runs, read_record, read_records


def make_run(
    scratch: Path, name: str = "20260101-000000-aaaa", *, job: str | None = "7", verdict: str = ""
) -> RunFolder:
    folder = RunFolder(scratch / "project" / "default" / name)
    job_start = folder.job_start(f"{job}-0" if job else "pid-1-a")
    job_start.path.mkdir(parents=True)
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to(job_start.path.name)
    folder.run_json.write_text(json.dumps({"nodes": 2, "nproc": 4, "host": "here"}))
    if job:
        folder.job.write_text(f"{job}\n")
    if verdict:
        job_start.verdict.write_text(f"{verdict}\n")
    return folder


# scheduler's state, verdict, cancelled? -> status, is it over?
TABLE = [
    ("PENDING", "", False, "queued", False),
    ("PENDING", "stopped", False, "queued", False),
    ("RUNNING", "", False, "running", False),
    ("COMPLETING", "done", False, "ending", False),
    ("COMPLETED", "done", False, "done", True),
    ("COMPLETED", "", False, "lost", True),  # it is another run's job
    ("FAILED", "failed", False, "failed", True),
    ("FAILED", "done", False, "done", True),
    ("FAILED", "stopped", False, "stopped", True),  # --no-requeue: the job's exit code is 75
    ("CANCELLED", "", True, "cancelled", True),
    ("TIMEOUT", "", False, "timed out", True),
    ("NODE_FAIL", "", False, "node failed", True),
    ("OUT_OF_MEMORY", "failed", False, "out of memory", True),
    ("TELEPORTING", "", False, "teleporting", False),
    (None, "done", False, "done", True),
    (None, "failed", False, "failed", True),
    (None, "stopped", False, "stopped", True),
    (None, "", True, "cancelled", True),
    (None, "", False, "lost", True),
]


@pytest.mark.parametrize(("state", "verdict", "cancelled", "status", "over"), TABLE)
def test_status(
    *, tmp_path: Path, state: str | None, verdict: str, cancelled: bool, status: str, over: bool
) -> None:
    folder = make_run(tmp_path, verdict=verdict)
    if cancelled:
        folder.cancelled.touch()
    states = {} if state is None else {"7": JobState("7", state)}
    record = read_record(folder, lambda jobs: states)
    assert (record.status, record.is_over) == (status, over)


def test_status_is_unknown_if_the_scheduler_does_not_respond(tmp_path: Path) -> None:
    def silent(jobs: Iterable[str]) -> dict[str, JobState]:
        raise ClusterError("No answer.")

    assert read_record(make_run(tmp_path), silent).status == "unknown"
    again = make_run(tmp_path, "20260101-000002-cccc", job="9", verdict="stopped")
    assert read_record(again, silent).status == "unknown", "it may be in the queue again"
    finished = make_run(tmp_path, "20260101-000001-bbbb", job="8", verdict="done")
    assert (read_record(finished, silent).status, read_record(finished, silent).hint) == (
        "done",
        "",
    )


def test_a_run_that_writes_is_running_although_the_scheduler_does_not_respond(
    tmp_path: Path,
) -> None:
    def silent(jobs: Iterable[str]) -> dict[str, JobState]:
        raise ClusterError("squeue did not respond.", hint="Check it.")

    folder = make_run(tmp_path)
    folder.metrics.write_text('{"step": 3, "time": 1.0}\n')
    folder.events.mkdir()
    (folder.events / "agent-0.jsonl").write_text(
        json.dumps({"event": "node", "time": 1.0, "nodelist": "n[1-2]"})
    )
    record = read_record(folder, silent)
    assert (record.status, record.is_over, record.latest.step) == ("running", False, 3)
    assert (record.detail, record.hint) == ("n[1-2]; squeue did not respond", "Check it.")
    old = time.time() - 600
    os.utime(folder.metrics, (old, old))
    assert read_record(folder, silent).status == "unknown", "it may have ended since"
    folder.system.mkdir()
    (folder.system / "node-1.jsonl").touch()
    assert read_record(folder, silent).status == "running", (
        "it evaluates, but its nodes are sampled"
    )
    folder.job_start("7-0").verdict.write_text("stopped\n")
    assert read_record(folder, silent).status == "unknown", "it may be in the queue again"
    folder.job_start("7-0").verdict.unlink()
    folder.fetched.write_text('{"cluster": "alps"}')
    assert read_record(folder, silent).status == "unknown", "another cluster's"


def test_an_unknown_status_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(jobs: Iterable[str]) -> dict[str, JobState]:
        raise ClusterError("squeue is not installed here.", hint="Run this on a login node.")

    folder = make_run(tmp_path)
    record = read_record(folder, missing)
    assert record.detail == "squeue is not installed here"
    assert record.hint == "Run this on a login node."
    folder.run_json.write_text('{"slurm_conf": "/etc/my slurm.conf"}')
    assert read_record(folder, missing).hint.endswith("export SLURM_CONF='/etc/my slurm.conf'")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", "/etc/my slurm.conf")
        assert read_record(folder, missing).hint == "Run this on a login node."
    assert read_record(folder, lambda jobs: {"7": JobState("7", "RUNNING", nodes="n1")}).hint == ""


def test_a_run_that_is_cancelled_but_not_over_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "call", lambda argv: None)
    folder, states = make_run(tmp_path), {"7": JobState("7", "RUNNING", nodes="n1")}
    slurm.request_stop(folder, "7")
    record = read_record(folder, lambda jobs: states)
    assert (record.status, record.detail) == ("running", "cancelled: it saves and stops")
    write_atomically(folder.cancelled, "1\n")
    assert read_record(folder, lambda jobs: states).detail == "cancelled: it is ending"
    here = make_run(tmp_path, "20260101-000001-bbbb", job=None)
    here.cancelled.touch()
    assert read_record(here).status == "cancelled"
    write_atomically(here.job_start("pid-1-a").process, describe_processes([os.getpid()]))
    assert (read_record(here).status, read_record(here).detail) == (
        "running",
        "cancelled: it saves and stops",
    )


def test_many_runs_need_one_query(tmp_path: Path) -> None:
    queries = []

    def query(jobs: Iterable[str]) -> dict[str, JobState]:
        queries.append(sorted(jobs))
        return {}

    for number in range(5):
        make_run(tmp_path, f"20260101-00000{number}-aaaa", job=str(number))
    # a file in a project's snapshot
    copied = tmp_path / "project" / ".snapshots" / "f00d" / "run.json"
    copied.parent.mkdir(parents=True)
    copied.touch()
    records = read_records(find_runs(tmp_path)[:4], query)
    assert queries == [["1", "2", "3", "4"]]
    assert records[0].run_id == "20260101-000004-aaaa"


@pytest.mark.parametrize(
    ("state", "verdict", "by", "detail"),
    [
        ("TIMEOUT", "", "", "time limit reached"),
        ("TIMEOUT", "stopped", "the time limit is reached", "time limit reached"),
        ("FAILED", "stopped", "time limit in 60 s", "time limit reached"),  # --no-requeue
        (None, "stopped", "time limit in 60 s", "time limit reached"),
        (None, "stopped", "Ctrl-C", ""),
        (None, "done", "time limit in 60 s", ""),
    ],
)
def test_a_run_that_the_time_limit_has_ended_says_so(
    tmp_path: Path, state: str | None, verdict: str, by: str, detail: str
) -> None:
    folder = make_run(tmp_path, verdict=verdict)
    folder.events.mkdir()
    events = [{"time": 1.0, "event": "started"}, {"time": 2.0, "event": "stop_requested", "by": by}]
    (folder.events / "agent-0.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in events)
    )
    states = {} if state is None else {"7": JobState("7", state)}
    assert read_record(folder, lambda jobs: states).detail == detail
    folder.cancelled.touch()
    assert read_record(folder, lambda jobs: states).detail == (
        "" if verdict == "done" else "by you"
    )


def test_a_failed_requeue_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="stopped")
    write_atomically(folder.job_start("7-0").requeue_failed, "Access/permission denied\n")
    record = read_record(folder, lambda jobs: {"7": JobState("7", "FAILED", nodes="n1")})
    assert record.detail == "not requeued: Access/permission denied"
    again = read_record(folder, lambda jobs: {"7": JobState("7", "PENDING", reason="Priority")})
    assert again.detail == "waits for nodes: other jobs come first", (
        "somebody has requeued it by hand"
    )


@pytest.mark.parametrize(
    ("reason", "detail"),
    [
        (
            "launch failed requeued held",
            "held, because Slurm could not launch it; use `scontrol release 7`",
        ),
        ("job requeued in held state", "job requeued in held state; use `scontrol release 7`"),
        ("JobHeldUser", "held by you; use `scontrol release 7`"),
        ("JobHeldAdmin", "held by an administrator; only an administrator can release it"),
    ],
)
def test_a_job_that_slurm_holds_waits_for_a_person(scratch: Path, reason: str, detail: str) -> None:
    folder = make_run(scratch, job="7")
    record = read_record(folder, lambda jobs: {"7": JobState("7", "PENDING", reason=reason)})
    assert record.detail == detail


def test_a_requeue_that_slurm_forgot_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="stopped")
    states = {"7": JobState("7", "FAILED", nodes="n1")}
    assert read_record(folder, lambda jobs: states).detail == "n1", (
        "it was not meant to be requeued"
    )
    write_atomically(folder.job_start("7-0").requeue, "\n")
    assert read_record(folder, lambda jobs: states).detail.startswith(
        "not requeued: Slurm forgot it"
    )
    cancelled = {"7": JobState("7", "CANCELLED", nodes="n1")}
    assert read_record(folder, lambda jobs: cancelled).detail == "n1"


def test_a_run_that_saved_because_it_was_cancelled_was_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agents ask for a requeue whenever they stop; its batch shell knows better, and ends with an error."""
    monkeypatch.setattr(slurm, "call", lambda argv: None)
    folder, states = (
        make_run(tmp_path, verdict="stopped"),
        {"7": JobState("7", "FAILED", nodes="n1")},
    )
    write_atomically(folder.job_start("7-0").requeue, "\n")
    slurm.request_stop(folder, "7")
    record = read_record(folder, lambda jobs: states)
    assert (record.status, record.detail, record.can_go_on) == ("cancelled", "by you", True)
    write_atomically(folder.cancelled, "1\n")
    assert not read_record(folder, lambda jobs: states).can_go_on, "nobody has asked it to save"


def test_a_cancelled_run_says_by_whom_and_from_where_it_can_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, states = (
        make_run(tmp_path, verdict="stopped"),
        {"7": JobState("7", "CANCELLED", nodes="n1")},
    )
    checkpoint = folder.path / "checkpoints" / "step-00000425"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    assert read_record(folder, lambda jobs: states).detail == "can continue from step 425"
    write_atomically(folder.cancelled, "1\n")
    assert read_record(folder, lambda jobs: states).detail == "by you; can continue from step 425"
    assert read_record(folder, lambda jobs: {}).detail == "by you; can continue from step 425"
    monkeypatch.setattr("paceline.watch.run_status.is_own_folder", lambda path: False)
    assert read_record(folder, lambda jobs: states).detail == "can continue from step 425"


@pytest.mark.parametrize(
    "states", [{}, {"7": JobState("7", "COMPLETED", nodes="n1")}], ids=["unknown", "given away"]
)
def test_a_job_that_slurm_forgot_is_named(tmp_path: Path, states: dict[str, JobState]) -> None:
    record = read_record(make_run(tmp_path), lambda jobs: states)
    assert (record.status, record.is_over) == ("lost", True)
    assert record.detail.startswith("Slurm forgot job 7")


def test_a_job_that_slurm_ended_at_its_time_limit(tmp_path: Path) -> None:
    state = JobState("7", "TIMEOUT", "TimeLimit", nodes="n1", exit_code="0:15")
    assert read_record(make_run(tmp_path), lambda jobs: {"7": state}).detail == "time limit reached"


def test_a_local_run_without_a_verdict_is_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path, job=None)
    write_atomically(folder.job_start("pid-1-a").process, describe_processes([999999999]))
    assert read_record(folder).status == "lost"


def test_a_run_whose_script_was_only_written_is_prepared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "project" / "default" / "20260101-000000-aaaa")
    folder.path.mkdir(parents=True)
    folder.run_json.write_text("{}")
    folder.script.touch()
    record = read_record(folder)
    assert (record.status, record.is_over) == ("prepared", False)


def test_without_metrics_the_step_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="done")
    assert make_overview(read_record(folder, lambda jobs: {})).step is None
    for step in (2, 3):
        (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step:08d}" / "complete.json").touch()
    assert make_overview(read_record(folder, lambda jobs: {})).step == 3
    folder.metrics.write_text('{"step": 2, "loss": 1.5}\n')
    assert make_overview(read_record(folder, lambda jobs: {})).step == 2


def test_a_run_that_had_nothing_left_to_do_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, job=None, verdict="done")
    assert (read_record(folder).status, read_record(folder).detail) == ("done", "here")
    folder.events.mkdir()
    events = [{"time": 1.0, "event": "started"}, {"time": 2.0, "event": "nothing_left", "step": 4}]
    (folder.events / "rank-0.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in events)
    )
    assert (read_record(folder).status, read_record(folder).detail) == (
        "done",
        "nothing was left to do",
    )


def test_a_run_that_slurm_forgot_keeps_its_nodes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="done")
    folder.events.mkdir()
    events = [
        {"time": n, "event": "node", "job_start": f"7-{n}", "nodelist": f"n[{n}-9]"}
        for n in (1.0, 2.0)
    ]
    (folder.events / "agent-0.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in events)
    )
    for states in ({}, {"7": JobState("7", "COMPLETED")}):
        assert read_record(folder, lambda jobs, states=states: states).detail == "n[2.0-9]"


def test_a_job_that_waits_for_others_names_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "20260101-000001-bbbb", job="8")
    folder.events.mkdir()
    states = {"8": JobState("8", "PENDING", reason="Dependency")}
    for after, words in ((["7"], "job 7"), (["5", "6"], "job 5, 6")):
        (folder.events / "launch.jsonl").write_text(
            json.dumps({"event": "queued", "job": "8", "after": after}) + "\n"
        )
        assert read_record(folder, lambda jobs: states).detail == f"waits for {words}"


def test_a_job_waits_for_the_begin_time_that_was_asked_for_or_for_that_of_a_requeue(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path)
    states = {"7": JobState("7", "PENDING", reason="BeginTime")}
    assert read_record(folder, lambda jobs: states).detail == "waits for its begin time"
    folder.job_start("7-0").requeue.touch()
    detail = read_record(folder, lambda jobs: states).detail
    assert detail == "waits for its begin time (Slurm delays a requeued job)"


@pytest.mark.parametrize("state", ["RUNNING", "FAILED", ""])
def test_the_job_of_a_run_that_was_fetched_is_not_one_of_this_cluster(
    tmp_path: Path, state: str
) -> None:
    folder = make_run(tmp_path)
    about = {"cluster": "alps", "status": "running", "time": 1_800_000_000.0, "files": []}
    folder.fetched.write_text(json.dumps(about))
    record = read_record(folder, lambda jobs: {job: JobState(job, state) for job in jobs if state})
    assert (record.status, record.is_over) == ("unknown", False)
    assert re.fullmatch(
        r"fetched from alps on 2027-01-1\d \d\d:\d\d, when it was running", record.detail
    )
    folder.run_json.write_text('{"slurm_conf": "/etc/of-alps.conf"}')
    assert f"paceline fetch {folder.key} --on alps" in read_record(folder, lambda jobs: {}).hint
    folder.job_start("7-0").verdict.write_text("failed\n")
    assert read_record(folder, lambda jobs: {}).status == "failed"
    folder.job_start("7-0").verdict.write_text("done\n")
    assert read_record(folder, lambda jobs: {}).status == "done"


@pytest.mark.parametrize("text", ["[1, 2]", '{"pages": 3}', "", "\0\x1b[31m"])
def test_a_script_may_write_a_file_with_the_name_of_the_record_of_fetching(
    tmp_path: Path, text: str
) -> None:
    folder = make_run(tmp_path)
    folder.fetched.write_text(text)
    record = read_record(folder, lambda jobs: {job: JobState(job, "RUNNING") for job in jobs})
    assert record.status == "running"
