"""Errors of the agent itself: the run folder says why the run ended."""

from __future__ import annotations

from paceline.launch.local_run import START_AGENT
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
