"""What the head agent leaves for the batch script: a verdict, and whether to requeue."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.attempt import Outcome
from paceline.agent.health.preflight import exclude_nodes
from paceline.agent.rank_failures import Failure, RankExit
from paceline.agent.retry_policy import MAX_EXCLUSIONS, MAX_STOPS_WITHOUT_PROGRESS
from paceline.agent.stop import Requests
from paceline.agent.verdict_writer import VerdictWriter
from paceline.contract.heartbeat_file import READY, SAVED_AND_STOPPED
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder, read_verdict
from paceline.errors import LaunchError
from tests.small_disk import fill, mount_small_disk

IN_A_JOB = {"SLURM_JOB_ID": "7", "PACELINE_JOB_START": "7-1"}


def head(run: RunFolder, environ: dict[str, str] | None = None, **settings: Any) -> VerdictWriter:
    launch_spec = LaunchSpec(run_id="r", program="train.py", args=[], **settings)
    environ = IN_A_JOB if environ is None else environ
    return VerdictWriter(run, launch_spec, environ=environ, requests=Requests(), say=print)


@pytest.mark.parametrize(
    ("verdict", "unfit", "earlier", "requeue"),
    [
        ("done", [], [], None),
        ("done", ["n2"], [], None),
        ("stopped", [], [], ""),
        ("stopped", [], ["n4"], "n4"),
        ("failed", [], [], None),
        ("failed", [], ["n4"], None),
        ("failed", ["n2", "n3"], [], "n2,n3"),
        ("failed", ["n2"], ["n4"], "n2,n4"),
    ],
)
def test_the_agent_decides_whether_to_requeue(
    tmp_path: Path, verdict: str, unfit: list[str], earlier: list[str], requeue: str | None
) -> None:
    run = RunFolder(tmp_path)
    exclude_nodes(run.job_start("7-0"), earlier)
    exclude_nodes(run.job_start("7-1"), unfit)
    head(run).write_verdict(verdict)
    assert read_verdict(run.job_start("7-1").verdict) == verdict
    file = run.job_start("7-1").requeue
    assert (file.read_text() if file.exists() else None) == (
        None if requeue is None else requeue + "\n"
    )


def test_exclusions_requeue_a_failed_run_a_few_times_only(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for start in range(MAX_EXCLUSIONS + 1):
        exclude_nodes(run.job_start(f"7-{start}"), [f"n{start}"])
        head(run, {**IN_A_JOB, "PACELINE_JOB_START": f"7-{start}"}).write_verdict("failed")
    requeued = [run.job_start(f"7-{start}").requeue.exists() for start in range(MAX_EXCLUSIONS + 1)]
    assert requeued == [True] * MAX_EXCLUSIONS + [False]


def test_nodes_that_the_user_chose_are_not_excluded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    exclude_nodes(run.job_start("7-1"), ["n2"])
    head(run, fixed_nodes=True).write_verdict("failed")
    assert not run.job_start("7-1").requeue.exists()
    head(run, fixed_nodes=True).write_verdict("stopped")
    assert run.job_start("7-1").requeue.read_text() == "\n"


def test_a_full_disk_does_not_keep_a_run_from_the_queue(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "100k") as disk:
        verdicts = head(RunFolder(disk))
        verdicts.announce()
        verdicts.begin(host="n1", newest_attempt=0)
        fill(disk)
        verdicts.write_verdict("stopped")
        assert read_verdict(verdicts.job_start.verdict) == "stopped"
        assert verdicts.job_start.requeue.read_text() == "\n"


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "PACELINE_JOB_START": "pid-3"}])
def test_a_run_without_a_queue_is_not_requeued(tmp_path: Path, environ: dict[str, str]) -> None:
    verdicts = head(RunFolder(tmp_path), environ)
    verdicts.write_verdict("stopped")
    assert read_verdict(verdicts.job_start.verdict) == "stopped"
    assert not verdicts.job_start.requeue.exists()


@pytest.mark.parametrize(("verdict", "unfit"), [("stopped", []), ("failed", ["n2"])])
def test_a_run_that_the_user_keeps_out_of_the_queue_is_not_requeued(
    tmp_path: Path, verdict: str, unfit: list[str]
) -> None:
    run = RunFolder(tmp_path)
    exclude_nodes(run.job_start("7-1"), unfit)
    verdicts = head(run, requeue=False)
    verdicts.begin(host="n1", newest_attempt=0)
    verdicts.write_verdict(verdict)
    assert read_verdict(verdicts.job_start.verdict) == verdict
    assert [path.name for path in verdicts.job_start.path.iterdir() if "requeue" in path.name] == []


def test_no_limit_of_requeues_applies_to_a_run_that_the_user_keeps_out_of_the_queue(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    run.job_start("6-0").path.mkdir(parents=True)
    run.job_start("6-0").requeue.touch()
    idle = BEFORE_THE_FIRST_STEP["the runtime stopped"]
    found = {
        stop(run, number, idle, requeue=False, requeues_per_day=1)
        for number in range(MAX_STOPS_WITHOUT_PROGRESS + 1)
    }
    assert found == {"stopped"}


def test_the_verdict_is_written_even_if_requeue_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = head(RunFolder(tmp_path))
    verdicts.job_start.requeue.mkdir(parents=True)  # a folder in its path
    verdicts.write_verdict("stopped")
    assert read_verdict(verdicts.job_start.verdict) == "stopped"
    assert "warning: cannot write" in capsys.readouterr().out


def stop(run: RunFolder, number: int, rank_exit: RankExit, **settings: Any) -> str | None:
    """Stop a job start, and return its verdict."""
    verdicts = head(run, {**IN_A_JOB, "PACELINE_JOB_START": f"7-{number}"}, **settings)
    attempt = run.attempt(number + 1)
    attempt.path.mkdir()
    outcome = Outcome("stopped", exits=[rank_exit], stop_requested=True)
    verdicts.record_attempt(
        outcome, attempt, saved_before=verdicts.first_checkpoint, may_restart=True
    )
    is_stopped = read_verdict(verdicts.job_start.verdict) == "stopped"
    assert verdicts.job_start.requeue.exists() is (is_stopped and verdicts.may_requeue)
    return read_verdict(verdicts.job_start.verdict)


def test_a_job_start_that_lost_its_claim_is_not_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path)
    run.claims.mkdir()
    (run.claims / "1").symlink_to("7-0")
    verdicts = head(run, {**IN_A_JOB, "PACELINE_JOB_START": "7-0"}, max_restarts=3)
    for number, restarts in ((1, True), (2, False)):
        attempt = run.attempt(number)
        attempt.path.mkdir()
        outcome = Outcome("failed", Failure("killed", "a", message=f"reason {number}"))
        verdicts.record_attempt(outcome, attempt, saved_before=-1, may_restart=True)
        assert (outcome.restart_delay is not None) is restarts
        (run.claims / "2").symlink_to("7-1") if restarts else None
    assert "no restart: job start 7-1 has taken over this run" in capsys.readouterr().out
    assert read_verdict(verdicts.job_start.verdict) == "failed"
    assert not verdicts.job_start.requeue.exists()


def save(run: RunFolder, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "complete.json").touch()


def begin(run: RunFolder, environ: dict[str, str], max_restarts: int) -> None:
    """Start a head agent and its next attempt. Nobody ends them: the next head agent finds that this one was killed."""
    verdicts = head(run, environ, max_restarts=max_restarts)
    newest = len(run.attempts())
    verdicts.announce()
    attempt = run.attempt(newest + 1)
    attempt.path.mkdir()  # another agent may do this before the head agent continues
    verdicts.begin(host="n1", newest_attempt=newest)
    verdicts.begin_attempt(attempt, saved_before=verdicts.first_checkpoint)


@pytest.mark.parametrize("environ", [IN_A_JOB, {"PACELINE_JOB_START": "pid-3"}])
def test_killed_head_agents_use_restarts_only_without_a_new_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    run = RunFolder(tmp_path)
    begin(run, environ, 2)
    costs = []
    for step in (None, 2, 4, None):
        if step is not None:
            save(run, step)
        begin(run, environ, 2)
        costs.append(capsys.readouterr().out.strip().rpartition("restarting ")[2])
    free = "free, as the checkpoint advanced"
    assert costs == [
        "from the script's own checkpoint, if any (1 of 2)",
        f"from step 2 ({free})",
        f"from step 4 ({free})",
        "from step 4 (2 of 2)",
    ]
    with pytest.raises(LaunchError, match="An agent was killed, and all 2 restarts are used up"):
        begin(run, environ, 2)
    assert [read_verdict(attempt.verdict) for attempt in run.attempts()] == ["failed"] * 5 + [None]


def test_killed_ranks_and_killed_head_agents_share_the_restarts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    begin(run, IN_A_JOB, 1)
    begin(run, IN_A_JOB, 1)
    verdicts = head(run, max_restarts=1)
    outcome = Outcome("failed", Failure("killed", "n1", message="killed by SIGKILL"))
    verdicts.record_attempt(outcome, run.attempt(2), saved_before=-1, may_restart=True)
    assert outcome.restart_delay is None


def test_a_killed_head_agent_did_not_end_the_attempt_of_an_earlier_job_start(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    begin(run, {**IN_A_JOB, "PACELINE_JOB_START": "7-0"}, 2)  # its node died
    verdicts = head(run)
    verdicts.announce()
    verdicts.begin(host="n1", newest_attempt=1)  # and this one is killed before its first attempt
    begin(run, IN_A_JOB, 2)
    assert not run.attempt(1).failure.exists()


# a script without the runtime
SAYS_SAVED = RankExit(0, 75, 0.0, SAVED_AND_STOPPED, 0, says_saved=True)
BEFORE_THE_FIRST_STEP = {
    "the runtime stopped": RankExit(0, 0, 0.0, SAVED_AND_STOPPED, 0),
    "at the checkpoint": RankExit(0, 0, 0.0, SAVED_AND_STOPPED, 100),
    "before the session": RankExit(0, -15, 0.0, READY, 0, got_term=True),
}


@pytest.mark.parametrize(
    "style", ["fork", "srun", "torchrun", "spawn", "mpirun", "lightning", "accelerate"]
)
@pytest.mark.parametrize("when", BEFORE_THE_FIRST_STEP)
def test_stops_before_the_first_step_end_in_every_style(
    tmp_path: Path, style: str, when: str
) -> None:
    run = RunFolder(tmp_path)
    save(run, 100)
    found = [stop(run, number, BEFORE_THE_FIRST_STEP[when], style=style) for number in range(10)]
    assert found == ["stopped"] * (MAX_STOPS_WITHOUT_PROGRESS - 1) + ["failed"]
    assert "before it saved anything" in run.job_start("7-9").requeue_failed.read_text()


@pytest.mark.parametrize("style", ["fork", "torchrun", "mpirun"])
def test_what_counts_as_progress(tmp_path: Path, style: str) -> None:
    run = RunFolder(tmp_path)
    save(run, 100)
    for progress in (RankExit(0, 0, 0.0, SAVED_AND_STOPPED, 101), SAYS_SAVED):
        count = run.path / "stops-without-progress"
        count.write_text("9\n")
        number = len(run.attempts())
        assert stop(run, number, progress, style=style) == "stopped"
        assert not count.exists()


@pytest.mark.parametrize("style", ["fork", "torchrun"])
def test_a_run_is_requeued_so_many_times_a_day(tmp_path: Path, style: str) -> None:
    run = RunFolder(tmp_path)
    progress = SAYS_SAVED
    for number in range(5):
        yesterday = run.job_start(f"6-{number}").requeue
        yesterday.parent.mkdir(parents=True)
        yesterday.touch()
        os.utime(yesterday, (time.time() - 90000,) * 2)
    found = [stop(run, number, progress, style=style, requeues_per_day=3) for number in range(4)]
    assert found == ["stopped", "stopped", "stopped", "failed"]
    assert "3 times within a day" in run.job_start("7-3").requeue_failed.read_text()
