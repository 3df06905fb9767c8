"""Why a run failed, and what could not be saved, as `ps`, `show`, `logs` and `submit --wait` show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import runs
from paceline.cli.commands import show as show_facts
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError
from paceline.slurm.job_states import JobState
from paceline.sweep.results import find_error
from paceline.ui.terminal.run_view import describe_attempt
from paceline.watch.details import read_attempts
from paceline.watch.failure import describe_failure
from paceline.watch.overview import make_overview
from paceline.watch.records import read_record
from tests.watch.test_records import make_run

RAISED = {
    "type": "ValueError",
    "message": "no data",
    "where": "train.py:9 in main: raise ValueError",
    "code": 1,
}
EXITED = {
    "type": "",
    "message": "",
    "code": 2,
    "last_line": "train.py: error: argument --lr: invalid float value: 'x'",
}


def fail(folder: RunFolder, failure: dict[str, Any]) -> RunFolder:
    attempt = folder.attempt(1)
    attempt.path.mkdir()
    attempt.verdict.write_text("failed\n")
    attempt.failure.write_text(json.dumps({"cause": "error", "host": "n2", "rank": 3, **failure}))
    return folder


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (RAISED, "rank 3 on n2: ValueError: no data"),
        (
            EXITED,
            "rank 3 on n2: exit code 2: train.py: error: argument --lr: invalid float value: 'x'",
        ),
        ({"code": -9, "cause": "killed"}, "rank 3 on n2: killed by SIGKILL"),
        ({"code": -11, "cause": "crash", "message": ""}, "rank 3 on n2: killed by SIGSEGV"),
        (
            {"type": "ValueError", "message": "x" * 10_000},
            f"rank 3 on n2: ValueError: {'x' * 300}…",
        ),
    ],
)
def test_the_first_failing_rank_is_shown(
    tmp_path: Path, failure: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fail(make_run(tmp_path, verdict="failed"), failure)
    assert read_record(folder, lambda jobs: {"7": JobState("7", "FAILED")}).detail == line
    lines = describe_failure(folder)
    assert lines[0] == line
    assert lines[-1] == f"  its log: paceline logs --rank 3 {folder.path.name}"
    runs.say_failure(folder)
    assert f"paceline: {line}\n" in capsys.readouterr().err
    if "where" in failure:
        assert lines[1] == "  at train.py:9 in main: raise ValueError"
        [attempt] = read_attempts(read_record(folder))
        assert describe_attempt(attempt).endswith(
            "ValueError: no data\nat train.py:9 in main: raise ValueError"
        )
    assert line.endswith(find_error(folder))  # what a sweep shows


def test_a_run_that_started_no_rank_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path, verdict="failed")
    folder.events.mkdir()
    (folder.events / "agent-0.jsonl").write_text(
        '{"time": 1, "event": "failed", "reason": "Some nodes cannot run it."}\n'
    )
    assert describe_failure(folder) == ["Some nodes cannot run it."]


def test_checkpoints_that_could_not_be_written_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path, job=None, verdict="done")
    folder.events.mkdir()
    lines = [
        {"time": step, "event": "save_failed", "step": step, "error": "No space left on device"}
        for step in (4, 8)
    ]
    (folder.events / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_record(folder)
    assert record.status == "done"
    assert "2 checkpoints could not be written" in record.detail
    facts = dict(show_facts.state_facts(record, make_overview(record)))
    assert facts["saves"] == "2 failed, the last at step 8: No space left on device"


def test_a_run_whose_last_state_is_not_saved_is_not_plainly_done(tmp_path: Path) -> None:
    folder = make_run(tmp_path, job=None, verdict="done")
    folder.job_start("pid-1-a").unsaved.write_text("the last state (step 8) could not be saved\n")
    record = read_record(folder)
    assert (record.status, record.is_over) == ("done, not saved", True)
    assert record.detail == "the last state (step 8) could not be saved"


def test_the_advice_of_our_own_errors_is_in_the_row_of_the_run(tmp_path: Path) -> None:
    """`ps` shows one line, which says what to do about weights that do not fit."""
    error = CheckpointError(
        "Cannot start from a.pt. It lacks fc.", hint="Take what fits: --no-strict."
    )
    failure = {"type": "CheckpointError", "message": str(error), "code": 1}
    folder = fail(make_run(tmp_path, verdict="failed"), failure)
    detail = read_record(folder, lambda jobs: {"7": JobState("7", "FAILED")}).detail
    assert detail == f"rank 3 on n2: CheckpointError: {error.message} Take what fits: --no-strict."


LOST = "paceline: node n2 failed: its agent was killed\n"
DIED = "srun: error: Node failure on n2\nslurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 1 DUE TO NODE FAILURE\n"


@pytest.mark.parametrize(
    ("log", "died"),
    [
        (LOST + DIED, True),
        (LOST + DIED.replace("on n2", "on n[2-3]"), True),
        (LOST + DIED.replace("on n2", "on n[3-4]"), False),
        (LOST + DIED.replace("on n2", "on n[1-999999999]"), False),
        (LOST + DIED.partition("\n")[2], True),
        (LOST + DIED.replace("on n2", "on n3"), False),
        (LOST + "srun: error: n2: task 1: Killed\n", False),
        (DIED, False),
        (LOST + DIED + LOST, False),  # nobody knows which one it was
        (LOST + "the script says: DUE TO NODE FAILURE\n", False),
    ],
)
def test_slurm_knows_that_a_node_died(tmp_path: Path, log: str, *, died: bool) -> None:
    lost = {"rank": None, "code": None, "cause": "killed", "message": "its agent was killed"}
    folder = fail(make_run(tmp_path, verdict="failed"), lost)
    folder.slurm_log.write_text(log)
    words = "the node died: Slurm has marked it as failed" if died else "its agent was killed"
    assert describe_failure(folder) == [f"n2: {words}"]
    [attempt] = read_attempts(read_record(folder))
    assert attempt.failure is not None
    assert (attempt.failure.host, attempt.failure.text) == ("n2", words)
