"""What the head agent leaves for the batch script: a verdict, and whether to requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.agent.health.preflight import exclude_nodes
from paceline.agent.restart_policy import MAX_EXCLUSIONS
from paceline.agent.verdict_writer import VerdictWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import read_verdict

IN_A_JOB = {"SLURM_JOB_ID": "7", "PACELINE_JOB_START": "7-1"}


def head(run: RunFolder, environ: dict[str, str] | None = None, *, fixed_nodes: bool = False) -> VerdictWriter:
    launch_spec = LaunchSpec(run_id="r", program="train.py", args=[], fixed_nodes=fixed_nodes)
    return VerdictWriter(run, launch_spec, environ=IN_A_JOB if environ is None else environ, say=print)


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
    assert (file.read_text() if file.exists() else None) == (None if requeue is None else requeue + "\n")


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


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "PACELINE_JOB_START": "pid-3"}])
def test_a_run_without_a_queue_is_not_requeued(tmp_path: Path, environ: dict[str, str]) -> None:
    verdicts = head(RunFolder(tmp_path), environ)
    verdicts.write_verdict("stopped")
    assert read_verdict(verdicts.job_start.verdict) == "stopped"
    assert not verdicts.job_start.requeue.exists()


def test_a_later_failure_takes_the_requeue_back(tmp_path: Path) -> None:
    verdicts = head(RunFolder(tmp_path))
    verdicts.write_verdict("stopped")
    verdicts.write_verdict("failed")
    assert not verdicts.job_start.requeue.exists()


def test_the_verdict_is_written_even_if_requeue_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = head(RunFolder(tmp_path))
    verdicts.job_start.requeue.mkdir(parents=True)  # a folder in its path
    verdicts.write_verdict("stopped")
    assert read_verdict(verdicts.job_start.verdict) == "stopped"
    assert "warning: cannot write" in capsys.readouterr().out
