"""What a run is called, by its folder and by what the scheduler says of its job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.cluster.slurm.partitions import SEPARATOR, fair_cpus, parse_gres, parse_sinfo
from paceline.cluster.slurm.states import ENDED, STATES, UNKNOWN, JobState, normalize_state
from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError
from paceline.watch.logs import RunMonitor, find_log, follow
from paceline.watch.records import find_runs, last_step, read_record, read_records


def make_run(
    scratch: Path, name: str = "20260101-000000-aaaa", *, job: str | None = "7", verdict: str = ""
) -> RunFolder:
    folder = RunFolder(scratch / "project" / "default" / name)
    job_start = folder.job_start(f"{job}-0" if job else "pid-1")
    job_start.path.mkdir(parents=True)
    folder.run_json.write_text(json.dumps({"nodes": 2, "nproc": 4, "host": "here"}))
    if job:
        folder.job.write_text(f"{job}\n")
    if verdict:
        job_start.verdict.write_text(f"{verdict}\n")
    return folder


# scheduler's state, verdict, cancelled? -> the word, is it over?
TABLE = [
    ("PENDING", "", False, "queued", False),
    ("PENDING", "stopped", False, "queued", False),
    ("RUNNING", "", False, "running", False),
    ("COMPLETING", "done", False, "ending", False),
    ("COMPLETED", "done", False, "done", True),
    ("FAILED", "failed", False, "failed", True),
    ("FAILED", "done", False, "done", True),
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


@pytest.mark.parametrize(("state", "verdict", "cancelled", "word", "over"), TABLE)
def test_status(
    *, tmp_path: Path, state: str | None, verdict: str, cancelled: bool, word: str, over: bool
) -> None:
    folder = make_run(tmp_path, verdict=verdict)
    if cancelled:
        folder.cancelled.touch()
    known = {} if state is None else {"7": JobState("7", state)}
    record = read_record(folder, lambda jobs: known)
    assert (record.status, record.is_over) == (word, over)


def test_a_scheduler_that_does_not_answer_leaves_runs_unknown(tmp_path: Path) -> None:
    def silent(jobs: Iterable[str]) -> dict[str, JobState]:
        raise ClusterError("no answer")

    assert read_record(make_run(tmp_path), silent).status == "unknown"
    again = make_run(tmp_path, "20260101-000002-cccc", job="9", verdict="stopped")
    assert read_record(again, silent).status == "unknown", "it may be in the queue again"
    finished = make_run(tmp_path, "20260101-000001-bbbb", job="8", verdict="done")
    assert read_record(finished, silent).status == "done"


def test_many_runs_are_one_question(tmp_path: Path) -> None:
    asked = []

    def ask(jobs: Iterable[str]) -> dict[str, JobState]:
        asked.append(sorted(jobs))
        return {}

    for number in range(5):
        make_run(tmp_path, f"20260101-00000{number}-aaaa", job=str(number))
    copied = tmp_path / "project" / ".snapshots" / "f00d" / "run.json"  # a file of somebody's project
    copied.parent.mkdir(parents=True)
    copied.touch()
    records = read_records(find_runs(tmp_path, limit=4), ask)
    assert asked == [["1", "2", "3", "4"]]
    assert records[0].run_id == "20260101-000004-aaaa"


def test_a_local_run_that_left_no_verdict_is_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path, job=None)
    (folder.path / "job-starts" / "pid-1").rename(folder.path / "job-starts" / "pid-999999999")
    assert read_record(folder).status == "lost"


def test_states_are_words_and_unknown_ones_are_shown() -> None:
    assert normalize_state("CANCELLED by 1000") == "CANCELLED"
    assert normalize_state("RUNNING+") == "RUNNING"
    strange = JobState("1", "TELEPORTING")
    assert (strange.label, strange.phase) == ("teleporting", UNKNOWN)
    assert {phase for _, phase in STATES.values()} >= {ENDED}


def test_following_goes_on_over_attempts_to_the_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    record_of = {"state": "RUNNING"}

    def see(folder: RunFolder) -> object:
        return read_record(folder, lambda jobs: {"7": JobState("7", record_of["state"])})

    monitor = RunMonitor(folder, see)  # type: ignore[arg-type]
    first, second = folder.attempt(1), folder.attempt(2)
    first.path.mkdir()
    first.log(0).write_text("one\n")
    heard = []
    for text in follow(folder, monitor=monitor):
        heard.append(text)
        if text == "one\n":
            with open(first.log(0), "a", encoding="utf-8") as log:
                log.write("two é\n")
        elif text.startswith("two"):
            second.path.mkdir()
            second.log(0).write_text("three\n")
        elif text == "three\n":
            record_of["state"] = "COMPLETED"
            folder.job_start("7-0").verdict.write_text("done\n")
    assert heard == ["one\n", "two é\n", "three\n"]
    assert monitor.record.status == "done"


def test_past_many_ranks_the_log_is_the_nodes(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert find_log(folder) is None
    attempt = folder.attempt(1)
    attempt.path.mkdir()
    attempt.node_log(1).touch()
    assert find_log(folder, rank=5) == attempt.node_log(1)


def test_the_last_step_survives_a_torn_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) is None
    metrics.write_text('{"step": 41}\n{"step": 42, "loss": 1.0}\n{"step": 4')
    assert last_step(metrics) == 42


SINFO = "\n".join(
    SEPARATOR.join(line)
    for line in (
        ("main*", "up", "infinite", "4", "64", "512000", "gpu:a100:4(S:0-1)", "(null)", "idle", "1-infinite"),
        ("main*", "up", "infinite", "2", "32", "256000", "gpu:v100:2,lustre:1", "old", "down*", "1-infinite"),
        ("short", "down", "1:00:00", "4", "64", "512000", "(null)", "a,b", "mixed", "1-2"),
        ("garbled",),
    )
)


def test_partitions_are_read_by_field() -> None:
    main, short = parse_sinfo(SINFO)
    assert (main.name, main.is_default, main.max_time, main.nodes) == ("main", True, None, 6)
    assert main.gpu_types == {"a100": 4, "v100": 2}
    assert [kind.usable for kind in main.kinds] == [True, False]
    assert (
        main.count_nodes(gpus=4),
        main.count_nodes(gpus=1, gpu_type="v100"),
        main.count_nodes(gpus=8),
    ) == (4, 2, 0)
    assert (short.is_up, short.max_time, short.max_nodes) == (False, 3600, 2)
    assert parse_gres("gpu:8") == {"": 8}
    # The least share over the nodes that would do: 64 cores for 4 GPUs, 32 for 2.
    assert fair_cpus([main], gpus=2, gpu_type=None, nproc=2) == 16
    assert fair_cpus([], gpus=2, gpu_type=None, nproc=2) == 1
