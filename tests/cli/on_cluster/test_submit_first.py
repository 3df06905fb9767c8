"""`submit --first`: what became of a submission, and whether an agent waits."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.cli.on_cluster import cluster_request, submit_first
from paceline.cli.on_cluster.cluster_race import Contender
from paceline.cli.on_cluster.on_cluster import Forwarded
from paceline.contract.run_folder import SUBMITTING, RunFolder
from paceline.errors import ClusterError, UsageError
from paceline.launch.confirmation.submission import begin_submission, settle_submission
from paceline.ssh import installation
from paceline.ssh.cluster_race_record import ClusterRaceRecord
from paceline.ssh.connection import Answer


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
    squeue.write_text(
        "#!/bin/sh\necho 'squeue: error: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    squeue.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        patch.setattr(time, "sleep", lambda _: None)
        yield squeue


def test_a_slurm_that_does_not_answer_is_not_taken_for_no_job(
    tmp_path: Path, silent_slurm: Path
) -> None:
    """Nothing begins and nothing is withdrawn until Slurm says whether there is a job."""
    run, record = tmp_path / "run", tmp_path / "a1"
    run.mkdir()
    (run / SUBMITTING).touch()
    before = json.dumps({"folder": str(run), "known": []})
    record.write_text(before)
    for decide in (settle_submission, begin_submission):
        with pytest.raises(
            ClusterError, match=r"Cannot find out whether Slurm has the job.*Socket timed out"
        ) as caught:
            decide(record)
        assert "Nothing was submitted" in caught.value.hint
        assert record.read_text() == before
    silent_slurm.write_text(f"#!/bin/sh\nprintf '7\\037%s\\n' '{run}'\n")
    for decide in (settle_submission, begin_submission):
        assert decide(record) == (RunFolder(run), "7")
    (run / SUBMITTING).unlink()  # killed before it had recorded the job
    assert begin_submission(record) == (RunFolder(run), "7")


def test_the_clock_of_the_login_node_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, now = tmp_path / "awaits-grant", time.time()
    waits.touch()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert submit_first._age(waits) < submit_first.ALIVE
    os.utime(waits, (now - 3600, now - 3600))
    assert submit_first._age(waits) > submit_first.ALIVE
    assert os.listdir(tmp_path) == ["awaits-grant"]


def test_each_event_of_a_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    contender = Contender("alps", "p/e/run", "", None)
    queued = {
        "decision": None,
        "waits": False,
        "over": False,
        "status": "queued",
        "detail": "",
        "reason": "",
    }
    running = {
        **queued,
        "status": "running",
        "detail": "waits for permission from your laptop until 12:10",
    }
    for found in (
        queued,
        {**queued, "detail": "other jobs go first; expected to start in 9m", "reason": "Priority"},
        {**queued, "detail": "other jobs go first; expected to start in 8m", "reason": "Priority"},
        {**running, "detail": "node1"},
        {**running, "waits": True},
        running,
        {**running, "decision": "granted"},
        {**running, "decision": "granted", "detail": "node1"},
    ):
        contender._say(found)
    contender.close()
    assert capsys.readouterr().err.splitlines() == [
        "alps: queued",
        "alps: queued (other jobs go first; expected to start in 9m)",
        "alps: started; waiting for permission to train",
    ]


@pytest.fixture
def interrupted(guard: None, tmp_path: Path) -> Iterator[ClusterRaceRecord]:
    """A submission to two clusters whose command was killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        patch.chdir(tmp_path)
        record = ClusterRaceRecord.begin(None, LINE, ["cedar", "alps"])
        record.send("alps")
        record.send("cedar")
        yield record


LINE = ["submit", "--first", "--env", "TOKEN=hush", "train.py"]


def start_again(
    line: list[str], *, at_terminal: str | None = None, on: Sequence[str] = ("alps", "cedar")
) -> None:
    """Type a command; `at_terminal` is the answer to its question. The error comes from what it does next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit_first, "_prepare", lambda *_: pytest.fail("prepared"))
        stdin = io.StringIO(at_terminal or "")
        for stream in (stdin, sys.stderr):
            patch.setattr(stream, "isatty", lambda: at_terminal is not None, raising=False)
        patch.setattr(sys, "stdin", stdin)
        submit_first.start(Forwarded(on, "submit", line, {"first": True}))


def test_a_contest_that_was_killed_is_finished_and_not_started_again(
    interrupted: ClusterRaceRecord, tmp_path: Path
) -> None:
    for answer in (None, "\n", "no\n"):
        with pytest.raises(UsageError) as caught:
            start_again(LINE, at_terminal=answer)
        assert f"paceline submit --finish {interrupted.id}" in caught.value.hint
        assert (
            ("may still be on alps, cedar" in caught.value.message)
            == ("--name" in caught.value.hint)
            == (answer is None)
        )
    assert "hush" not in "".join(
        path.read_text() for path in tmp_path.glob("state/paceline/first/*")
    )


def test_a_race_starts_if_it_is_wanted_or_another_one(
    interrupted: ClusterRaceRecord, tmp_path: Path
) -> None:
    def goes_on(
        line: list[str], answer: str | None = None, on: Sequence[str] = ("alps", "cedar")
    ) -> None:
        with pytest.raises(pytest.fail.Exception, match="prepared"):
            start_again(line, at_terminal=answer, on=on)

    goes_on(LINE, "y\n")
    goes_on([*LINE, "--lr", "0.1"])
    goes_on(LINE, on=("alps", "birch"))
    with interrupted.locked():  # its command still runs
        goes_on(LINE)
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "elsewhere")
        goes_on(LINE)
    # killed before it had sent anything
    ClusterRaceRecord.begin(None, LINE, ["alps", "cedar"]).save()
    interrupted.finish()
    goes_on(LINE)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("code", [0, 1])
def test_paceline_is_on_all_clusters_before_the_first_gets_a_job(
    monkeypatch: pytest.MonkeyPatch, *, is_recorded: bool, code: int
) -> None:
    """What was recorded about a cluster may be gone there."""
    installed: list[str] = []

    class Login:
        def __init__(self, name: str) -> None:
            self.name = name

        def call(self, script: str) -> Answer:
            assert "/cache/0/" in script
            return Answer(code, b"", "")

    monkeypatch.setattr(
        cluster_request, "make_request", lambda asked, _: (Login(asked.names[0]), None, None)
    )
    found = (
        installation.Installation("/usr/bin/python3", "/cache", "/cache/0") if is_recorded else None
    )
    monkeypatch.setattr(installation, "recorded_installation", lambda _: found)
    monkeypatch.setattr(
        installation, "install", lambda connection, _: installed.append(connection.name)
    )
    submit_first._prepare(Forwarded(["alps", "cedar"], "submit", LINE, {}), ["alps", "cedar"])
    assert installed == ([] if is_recorded and code == 0 else ["alps", "cedar"])
