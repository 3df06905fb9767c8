"""`submit --first`: what became of a submission, and whether an agent waits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import submit_first
from paceline.cli.first_contest import Contender
from paceline.cluster.slurm.confirmation.submission import begin_submission, settle_submission
from paceline.contract.run_folder import SUBMITTING, RunFolder
from paceline.errors import ClusterError


def test_a_submission_that_was_withdrawn_never_begins(tmp_path: Path) -> None:
    assert settle_submission(tmp_path / "a1") is None
    with pytest.raises(ClusterError, match="withdrawn"):
        begin_submission(tmp_path / "a1")
    assert settle_submission(tmp_path / "a1") is None


def test_a_submission_that_has_a_job_is_found(tmp_path: Path) -> None:
    (tmp_path / "a1").write_text(f'{{"folder": "{tmp_path}/run", "job": "7"}}')
    found = settle_submission(tmp_path / "a1")
    assert found == (RunFolder(tmp_path / "run"), "7")


@pytest.fixture
def silent_slurm(guard: None, tmp_path: Path) -> Iterator[Path]:
    """A squeue that fails as if the controller were too busy."""
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'squeue: error: Socket timed out on send/recv operation' >&2\nexit 1\n")
    squeue.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        patch.setattr(time, "sleep", lambda _: None)
        yield squeue


def test_a_slurm_that_does_not_answer_is_not_taken_for_no_job(tmp_path: Path, silent_slurm: Path) -> None:
    """Nothing begins and nothing is withdrawn until Slurm says whether there is a job."""
    run, record = tmp_path / "run", tmp_path / "a1"
    run.mkdir()
    (run / SUBMITTING).touch()
    before = json.dumps({"folder": str(run), "known": []})
    record.write_text(before)
    for decide in (settle_submission, begin_submission):
        with pytest.raises(ClusterError, match=r"does not say whether there is a job.*Socket timed out") as caught:
            decide(record)
        assert "nothing was submitted" in caught.value.hint
        assert record.read_text() == before
    silent_slurm.write_text(f"#!/bin/sh\nprintf '7\\037%s\\n' '{run}'\n")
    for decide in (settle_submission, begin_submission):
        assert decide(record) == (RunFolder(run), "7")
    (run / SUBMITTING).unlink()  # killed before it had recorded the job
    assert begin_submission(record) == (RunFolder(run), "7")


def test_the_clock_of_the_login_node_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, now = tmp_path / "awaits-grant", time.time()
    waits.touch()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert submit_first._age(waits) < submit_first.ALIVE
    os.utime(waits, (now - 3600, now - 3600))
    assert submit_first._age(waits) > submit_first.ALIVE
    assert os.listdir(tmp_path) == ["awaits-grant"]


def test_each_event_of_a_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    contender = Contender("alps", "p/e/run", "", None)
    queued = {"decision": None, "waits": False, "over": False, "status": "queued", "detail": ""}
    running = {**queued, "status": "running", "detail": "waits for permission from your laptop until 12:10"}
    for found in (
        queued,
        {**queued, "detail": "other jobs go first; expected to start in 9m"},
        {**queued, "detail": "other jobs go first; expected to start in 8m"},
        {**running, "detail": "node1"}, {**running, "waits": True}, running, {**running, "decision": "granted"},
        {**running, "decision": "granted", "detail": "node1"},
    ):  # fmt: skip
        contender._say(found)
    contender.close()
    assert capsys.readouterr().err.splitlines() == [
        "alps: queued",
        "alps: queued (other jobs go first; expected to start in 9m)",
        "alps: started; waits for permission to train",
    ]
