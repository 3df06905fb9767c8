"""The batch script on a real Slurm: what is requeued, what is not, and never twice.

The scripts are those that `paceline submit` writes; a small fake agent decides what happens in the job.
All scenarios run at once, since a requeue waits for Slurm's clocks and hardly computes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from paceline.slurm.batch_script import shell_library
from paceline.spec.run_path import RunPath
from tests.golden.cases import plan
from tests.slurm.harness import ENDED, Cluster

TIMEOUT = 240
PREEMPTED = "node3,node4"  # scenarios of preemption end all other jobs there

AGENT = """
import os, signal, sys, time
from pathlib import Path

run = Path(os.environ["PACELINE_RUN"])
job_start = run / "job-starts" / os.environ["PACELINE_JOB_START"]
stop_requests = []
signal.signal(signal.SIGTERM, lambda *_: stop_requests.append("TERM"))  # a stop request, as for the real one


def end(verdict, requeue=None):
    if requeue is not None:
        (job_start / "requeue").write_text(requeue)
    (job_start / "partial").write_text(verdict)
    (job_start / "partial").rename(job_start / "verdict")
    sys.exit(verdict == "failed")


(job_start / "host").write_text(os.environ["SLURMD_NODENAME"])
while True:
    if (run / "unfit").exists():
        exclude = (run / "unfit").read_text()
        (run / "unfit").unlink()
        end("failed", requeue=exclude)
    if (run / "done").exists():
        end("done")
    if (run / "crash").exists():
        end("failed")
    if stop_requests or (job_start / "stop").exists():
        end("stopped", requeue="")
    time.sleep(0.05)
"""


class Trial:
    """One run folder with a generated script, and its job."""

    def __init__(
        self, cluster: Cluster, scratch: Path, name: str, *, abandoned: threading.Event
    ) -> None:
        self.cluster = cluster
        self.abandoned = abandoned
        self.run_path = RunPath(scratch, "trials", "requeue", name)
        self.folder = self.run_path.folder.path
        self.folder.mkdir(parents=True)
        with zipfile.ZipFile(self.run_path.folder.run_half, "w") as run_half:
            run_half.writestr("__main__.py", AGENT)
        self.job = ""

    def submit(self, *options: str, edit: Callable[[str], str] = str, **keys: Any) -> None:
        """Plan a job of one node and one core, write its files, and submit its script."""
        settings = {
            "job.nodes": 1,
            "job.gpus_per_node": 0,
            "job.cpus_per_gpu": 1,
            "launch.nproc": 1,
            "job.time": "20m",
        } | {key.replace("__", "."): value for key, value in keys.items()}
        made = plan(settings, run_path=self.run_path, python=sys.executable)
        self.run_path.folder.script.write_text(edit(made.script))
        self.run_path.folder.shell_library.write_text(shell_library())
        self.run_path.folder.environment.write_text(made.environment_file)
        args = ["sbatch", "--parsable", *options, str(self.run_path.folder.script)]
        self.job = self.cluster.run(args).stdout.strip()

    def command_agent(self, command: str, text: str = "") -> None:
        """Make the agent do it: `done`, `crash` or `unfit`. Renamed into place, because the agent polls."""
        (self.folder / "partial").write_text(text)
        (self.folder / "partial").rename(self.folder / command)

    def started(self, job_start: int, *, job: str = "") -> str:
        """Wait until the agent of a job start runs, and return its node."""
        host = self.folder / "job-starts" / f"{job or self.job}-{job_start}" / "host"
        self.until(
            lambda: host.exists() and bool(host.read_text()),
            f"job start {job_start} does not start",
        )
        return host.read_text()

    def verdict(self, job_start: int) -> str:
        return (self.folder / "job-starts" / f"{self.job}-{job_start}" / "verdict").read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            log = self.run_path.folder.slurm_log
            text = log.read_text() if log.exists() else ""
            assert not self.abandoned.is_set(), "the tests were interrupted"
            assert time.monotonic() < deadline, (
                f"{what}; job: {self.cluster.show(self.job)}; its log:\n{text}"
            )
            time.sleep(0.2)

    def ends(self, state: str, *, restarts: int, job: str = "") -> None:
        """Check the final state: a script that requeues does so before it ends."""
        job = job or self.job
        self.until(lambda: self.cluster.state(job) in ENDED, f"job {job} does not end")
        log = self.run_path.folder.slurm_log.read_text()
        assert (self.cluster.state(job), self.cluster.restarts(job)) == (state, restarts), log

    def interrupt(self, job: str = "") -> None:
        """Send USR1 to the batch shell only, as Slurm does before the time limit."""
        self.cluster.run(["scancel", "--batch", "--signal=USR1", job or self.job])


def stopped_run_resumes(trial: Trial) -> None:
    trial.submit(job__name="Requeue=0 Restarts=")
    trial.started(0)
    trial.interrupt()
    trial.started(1)
    assert trial.verdict(0) == "stopped"
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1)
    log = trial.run_path.folder.slurm_log.read_text()
    assert "stopped" in log, "the first job start's lines were overwritten"
    assert "done" in log


def time_limit(trial: Trial) -> None:
    trial.submit(resume__grace="100s")
    trial.started(0)
    trial.cluster.run(["scontrol", "update", f"jobid={trial.job}", "endtime=now+105"])
    trial.started(1)
    assert trial.verdict(0) == "stopped"
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1)


def cancelled_by_scancel(trial: Trial) -> None:
    trial.submit()
    trial.started(0)
    trial.cluster.run(["scancel", trial.job])
    trial.ends("CANCELLED", restarts=0)


def cancelled_run_is_not_resurrected(trial: Trial) -> None:
    trial.submit()
    trial.started(0)
    trial.command_agent("cancelled")
    trial.interrupt()
    trial.ends("FAILED", restarts=0)
    assert trial.verdict(0) == "stopped"
    again = trial.cluster.run(
        ["sbatch", "--parsable", str(trial.run_path.folder.script)]
    ).stdout.strip()
    trial.ends("FAILED", restarts=0, job=again)


def crash(trial: Trial) -> None:
    trial.submit()
    trial.started(0)
    trial.command_agent("crash")
    trial.ends("FAILED", restarts=0)


def requeued_by_hand(trial: Trial) -> None:
    trial.submit()
    trial.started(0)
    trial.cluster.run(["scontrol", "requeue", trial.job])
    trial.started(1)
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1)


def no_requeue_allowed(trial: Trial) -> None:
    trial.submit("--no-requeue", job__exclude=PREEMPTED)
    trial.started(0)
    trial.interrupt()
    trial.ends("FAILED", restarts=0)
    following = (trial.folder / "job").read_text().strip()
    assert following != trial.job
    trial.started(0, job=following)
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=0, job=following)


def no_scontrol_on_the_nodes(trial: Trial) -> None:
    commands = trial.folder / "bin"
    commands.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name != "scontrol":
            (commands / path.name).symlink_to(path)
    trial.submit(
        edit=lambda script: script.replace(
            "paceline_start_job", f"PATH={commands}\npaceline_start_job", 1
        ),
        job__exclude=PREEMPTED,
    )
    trial.started(0)
    trial.interrupt()
    trial.ends("FAILED", restarts=0)
    following = (trial.folder / "job").read_text().strip()
    trial.started(0, job=following)
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=0, job=following)


def unfit_node_is_excluded(trial: Trial) -> None:
    trial.submit()
    unfit = trial.started(0)
    trial.command_agent("unfit", f"{unfit}\n")
    assert trial.started(1) != unfit
    assert trial.cluster.show(trial.job)["ExcNodeList"] == unfit
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1)


def last_task_of_an_array_is_requeued_alone(trial: Trial) -> None:
    # Each task of an array has a run folder of its own, below the array's.
    for task in "01":
        (trial.folder / task).mkdir()
        shutil.copy(trial.run_path.folder.run_half, trial.folder / task)
        (trial.folder / task / "environment.sh").touch()
        (trial.folder / task / "stop_and_requeue.sh").write_text(shell_library())
    folder = str(trial.folder)
    trial.submit(
        "--array=0-1",
        edit=lambda script: script.replace(f"run={folder} ", f"run={folder}/$SLURM_ARRAY_TASK_ID "),
    )
    first, last = (f"{trial.job}_{task}" for task in "01")
    job_starts = {
        task: trial.folder / task / "job-starts" / f"{trial.job}_{task}-0" / "host" for task in "01"
    }
    trial.until(
        lambda: all(host.exists() for host in job_starts.values()), "the tasks do not start"
    )
    trial.interrupt(last)
    again = trial.folder / "1" / "job-starts" / f"{last}-1" / "host"
    trial.until(again.exists, "the last task does not start again")
    assert (trial.cluster.state(first), trial.cluster.restarts(first)) == ("RUNNING", 0)
    for task in "01":
        (trial.folder / task / "done").touch()
    trial.ends("COMPLETED", restarts=0, job=first)
    trial.ends("COMPLETED", restarts=1, job=last)


def _preempted(trial: Trial, partition: str, node: str) -> None:
    trial.submit(job__partition=partition, job__nodelist=node)
    trial.started(0)
    urgent = trial.cluster.submit(
        "sleep 600", "--partition=high", "--exclusive", f"--nodelist={node}"
    )
    trial.until(lambda: trial.cluster.state(urgent) == "RUNNING", "the urgent job does not start")
    trial.until(
        lambda: trial.cluster.state(trial.job) == "PENDING", "the preempted job is not requeued"
    )
    trial.cluster.run(["scancel", urgent])
    trial.started(1)
    trial.command_agent("done")


def preempted_at_once(trial: Trial) -> None:
    _preempted(trial, "low", "node3")
    trial.ends("COMPLETED", restarts=1)


def preempted_after_a_grace(trial: Trial) -> None:
    """Slurm 22.05 lets the job complete; 24.11 requeues a job it meant to preempt, and it has nothing to do."""
    _preempted(trial, "grace", "node4")
    trial.until(lambda: trial.cluster.state(trial.job) in ENDED, f"job {trial.job} does not end")
    assert trial.cluster.state(trial.job) == "COMPLETED"
    assert (trial.verdict(0), trial.verdict(1)) == ("stopped", "done")
    assert not (trial.folder / "job-starts" / f"{trial.job}-2").exists(), "it ran once more"


# The controller fails to respond twice when the job is to be requeued.
AWAY = """\
scontrol() {
    local refused="$paceline_run/refused"
    if [ "$1" = requeue ] && [ ! -e "$refused-twice" ]; then
        if [ -e "$refused" ]; then mv "$refused" "$refused-twice"; else : >"$refused"; fi
        echo "scontrol: error: Unable to contact slurm controller (connect failure)" >&2
        return 1
    fi
    command scontrol "$@"
}

paceline_start_job"""


def an_unreachable_controller_is_retried(trial: Trial) -> None:
    trial.submit(edit=lambda script: script.replace("paceline_start_job", AWAY, 1))
    trial.started(0)
    trial.interrupt()
    trial.started(1)
    assert (trial.folder / "refused-twice").exists()
    assert trial.run_path.folder.slurm_log.read_text().count("Unable to contact") == 2
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1)


def eight_at_once_give_one_trainer(trial: Trial) -> None:
    """From one prepared script, as `--script-only` writes it; then the job that trained continues alone."""
    trial.submit("--hold", job__exclude=PREEMPTED)
    args = ["sbatch", "--parsable", "--hold", str(trial.run_path.folder.script)]
    jobs = [trial.job, *(trial.cluster.run(args).stdout.strip() for _ in range(7))]
    trial.cluster.run(["scontrol", "release", *jobs])
    trial.until(
        lambda: sum(trial.cluster.state(job) == "FAILED" for job in jobs) == 7, "several jobs train"
    )
    (trainer,) = (job for job in jobs if trial.cluster.state(job) != "FAILED")
    trial.started(0, job=trainer)
    assert len(list((trial.folder / "job-starts").iterdir())) == 1
    trial.interrupt(trainer)
    trial.started(1, job=trainer)
    trial.command_agent("done")
    trial.ends("COMPLETED", restarts=1, job=trainer)


SCENARIOS = [
    time_limit,
    stopped_run_resumes,
    cancelled_by_scancel,
    cancelled_run_is_not_resurrected,
    crash,
    requeued_by_hand,
    no_requeue_allowed,
    no_scontrol_on_the_nodes,
    unfit_node_is_excluded,
    last_task_of_an_array_is_requeued_alone,
    preempted_at_once,
    preempted_after_a_grace,
    an_unreachable_controller_is_retried,
    eight_at_once_give_one_trainer,
]
Scenario = Callable[[Trial], None]


@pytest.fixture(scope="module")
def carry_out(sandbox: Cluster) -> Iterator[Callable[[Scenario], None]]:
    """Wait for a scenario to end; all run at once. One that is retried after a failure runs alone."""
    with tempfile.TemporaryDirectory(
        prefix="paceline-trials-", ignore_cleanup_errors=True
    ) as scratch:
        count = iter(range(1000))
        abandoned = threading.Event()

        def run(scenario: Scenario) -> None:
            name = f"{scenario.__name__}-{next(count)}"
            scenario(Trial(sandbox, Path(scratch), name, abandoned=abandoned))

        pool = ThreadPoolExecutor(len(SCENARIOS))
        try:
            outcomes: dict[Scenario, Future[None]] = {
                each: pool.submit(run, each) for each in SCENARIOS
            }
            wait(outcomes.values())
        except BaseException:
            abandoned.set()
            raise
        finally:
            pool.shutdown()

        def outcome(scenario: Scenario) -> None:
            future = outcomes.pop(scenario, None)
            if future is None:
                run(scenario)
            else:
                future.result()

        sandbox.clear()
        yield outcome
        sandbox.clear()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: str(each.__name__))
def test_requeue(scenario: Scenario, carry_out: Callable[[Scenario], None]) -> None:
    carry_out(scenario)
