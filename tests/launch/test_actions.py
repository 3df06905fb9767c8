"""What people do to runs: cancel them, let them save and stop, put them back into the queue."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.contract.run_folder import SAVES_FIRST, RunFolder
from paceline.errors import UsageError
from paceline.launch import actions
from paceline.slurm import commands as slurm


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of Slurm that were called."""
    made: list[list[str]] = []

    def call(argv: list[str], **_: object) -> slurm.Completed:
        made.append(list(argv))
        return slurm.Completed(argv, 0, "", "")

    monkeypatch.setattr(slurm, "call", call)
    return made


def make_run(path: Path, *, job: str = "", requeue: bool = True) -> RunFolder:
    folder = RunFolder(path / "run-1")
    folder.path.mkdir()
    folder.run_json.write_text(json.dumps({"run_id": "run-1"}))
    folder.launch_spec.write_text(json.dumps({"requeue": requeue}))
    if job:
        folder.job.write_text(f"{job}\n")
    return folder


def test_a_running_job_saves_before_it_is_cancelled_and_a_queued_one_has_nothing_to_save(
    tmp_path: Path, calls: list[list[str]]
) -> None:
    folder = make_run(tmp_path, job="7_3")
    actions.cancel_run(folder, running=True, save=True)
    assert SAVES_FIRST in folder.cancelled.read_text()
    actions.cancel_run(folder, running=False, save=True)
    assert SAVES_FIRST not in folder.cancelled.read_text()
    assert calls == [["scancel", "--batch", "--signal=USR1", "7_3"], ["scancel", "7_3"]]


def test_a_running_job_requeues_itself_and_is_not_marked_as_cancelled(
    tmp_path: Path, calls: list[list[str]]
) -> None:
    folder = make_run(tmp_path, job="7")
    assert actions.requeue_run(folder, running=True, over=False) == "7"
    assert calls == [["scancel", "--batch", "--signal=USR1", "7"]]
    assert not folder.cancelled.exists()


@pytest.mark.parametrize(
    ("job", "requeue", "running", "problem"),
    [
        ("", True, True, "not a Slurm job"),
        ("7", True, False, "already in the queue as job 7"),
        ("7", False, True, "does not requeue itself"),
    ],
)
def test_what_cannot_be_requeued_is_refused(
    job: str, requeue: bool, running: bool, problem: str, *, tmp_path: Path, calls: list[list[str]]
) -> None:
    folder = make_run(tmp_path, job=job, requeue=requeue)
    with pytest.raises(UsageError, match=problem):
        actions.requeue_run(folder, running=running, over=False)
    assert not calls


def test_nothing_is_done_to_the_run_of_another_user(
    tmp_path: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, job="7")
    monkeypatch.setattr("paceline.spec.user_files._owner", lambda _: os.geteuid() + 1)
    with pytest.raises(UsageError, match="not yours"):
        actions.cancel_run(folder, running=True)
    with pytest.raises(UsageError, match="not yours"):
        actions.requeue_run(folder, running=True, over=False)
    assert not calls
    assert not folder.cancelled.exists()
