"""Errors of the agent itself: the run folder says why the run ended."""

from __future__ import annotations

from pathlib import Path

from paceline.launch.local_plan import START_AGENT
from paceline.watch.events import read_events
from tests.agent.conftest import Launch, Launched

FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
BROKEN = """\
from paceline.agent.attempt import Attempt
def run(self):
    raise ZeroDivisionError("by a defect")
Attempt.run = run
"""

LOST = """\
from paceline.agent.attempt import Attempt
from paceline.agent.rendezvous.membership import AgentsLost
def run(self):
    raise AgentsLost("Lost before attempt 1 began: node b.", hosts=["b"])
Attempt.run = run
"""


def reasons(started: Launched) -> list[str]:
    return [event["reason"] for event in read_events(started.run.events) if event.get("reason")]


def test_a_limit_on_open_files_that_is_too_low_is_named(launch: Launch) -> None:
    started = launch("", nproc=16, argv=("-c", FEW_FILES.format(soft=64, hard=64) + START_AGENT))
    assert started.wait() != 0
    assert "16 ranks on one node need 144 open files, but the limit is 64." in started.err()
    assert "ulimit -n 144" in started.err()
    assert len(reasons(started)) == 1
    assert "Traceback" not in started.err()


def test_a_soft_limit_on_open_files_is_raised(launch: Launch) -> None:
    started = launch("", nproc=16, argv=("-c", FEW_FILES.format(soft=64, hard=4096) + START_AGENT))
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("done", "done")


def test_a_defect_of_the_agent_ends_the_run_with_its_reason(launch: Launch) -> None:
    started = launch("", argv=("-c", BROKEN + START_AGENT))
    assert started.wait() == 1
    assert started.verdicts()[1] == "failed"
    assert reasons(started) == ["The agent failed: ZeroDivisionError: by a defect."]
    assert "Traceback" in started.err()


def test_ranks_of_a_job_start_that_lost_the_run_are_ended(launch: Launch, tmp_path: Path) -> None:
    """Another job start continues the run: these ranks would write logs and metrics until their next checkpoint."""
    claims = tmp_path / "run" / "claims"
    claims.mkdir(parents=True)
    for number, name in enumerate(["here", "8-0"], 1):
        (claims / str(number)).symlink_to(name)
    started = launch("import time; time.sleep(3600)", max_restarts=3, env={"SLURM_JOB_ID": "1"})
    assert started.wait() == 1
    assert "failed: job start 8-0 has taken over this run" in started.err()
    assert "no restart: job start 8-0 has taken over this run" in started.err()
    assert started.verdicts() == ("failed", "failed")
    assert not started.job_start.requeue.exists()
    assert "failed" not in started.events()


def test_a_node_that_is_lost_before_an_attempt_does_not_keep_the_batch_script(
    launch: Launch,
) -> None:
    """srun may wait for a node that died and came back, for as long as the job may run."""
    started = launch("", argv=("-c", LOST + START_AGENT), env={"SLURM_JOB_ID": "1"})
    assert started.wait() != 0
    assert started.verdicts()[1] == "failed"
    assert started.job_start.requeue.read_text() == "b\n"
    assert started.job_start.node_lost.exists()
    assert [
        event["lost_host"]
        for event in read_events(started.run.events)
        if event["event"] == "failed"
    ] == ["b"]
