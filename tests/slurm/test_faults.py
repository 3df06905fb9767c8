"""Whatever happens to a job on a real cluster, the run ends with the same weights and loss curve as without faults.

Two nodes with two ranks each. The training waits at gates, so that each fault happens at a known step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder, read_verdict
from paceline.watch.goodput import compute_goodput
from tests.fault_tolerance.runs import SCRIPT, Training, assert_same
from tests.slurm.harness import ENDED, Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of
from tests.until import until

pytestmark = pytest.mark.timeout(900)
TIMEOUT = 300.0
SHAPE = (
    "--nodes",
    "2",
    "--gpus",
    "2",
    "--cpus-per-gpu",
    "1",
    "--cpu",
    "--time",
    "30m",
    "--no-snapshot",
)


@pytest.fixture(scope="session")
def four_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The reference: the same number of ranks on this machine."""
    training = Training(tmp_path_factory.mktemp("four-undisturbed"), "--nproc", "4")
    training.start()
    try:
        training.finish()
    finally:
        training.close()
    return training


class Submitted(Training):
    """The same training, as a job."""

    def __init__(self, home: Path, cluster: Cluster, paceline: Paceline, **keys: Any) -> None:
        super().__init__(home, **keys)
        self.cluster = cluster
        self.paceline = paceline
        self.folder = RunFolder(home)
        self.job = ""

    @property
    def run(self) -> RunFolder:
        return self.folder

    def submit(self, *options: str) -> None:
        done = self.paceline(
            "submit", *SHAPE, *options, str(self.script), *self.script_args, cwd=self.home
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.folder = run_of(done)
        self.job = self.folder.job.read_text().strip()

    def logs(self) -> str:
        return f"{self.cluster.show(self.job)}\n{diagnostics(self.folder)}"

    def _has_ended(self) -> bool:
        return self.cluster.state(self.job) in ENDED

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, details=self.logs, within=TIMEOUT, pause=0.3)

    def restarted(self, times: int) -> None:
        """Wait until the job has been requeued this many times."""
        self.until(
            lambda: self.cluster.restarts(self.job) >= times,
            f"the job was not requeued {times} times",
        )

    def interrupt(self) -> None:
        """Send USR1 to the batch shell, as Slurm does before the time limit, and wait until the agent has seen it."""
        before = len(self.events_named("stop_requested"))
        self.cluster.run(["scancel", "--batch", "--signal=USR1", self.job])
        self.wait_for_stop_request(before)

    def wait_for_stop_request(self, before: int) -> None:
        self.until(
            lambda: len(self.events_named("stop_requested")) > before, "the stop request is ignored"
        )

    def completes(self) -> None:
        self.until(lambda: self.cluster.state(self.job) in ENDED, "it does not end")
        assert self.cluster.state(self.job) == "COMPLETED", self.logs()


@pytest.fixture
def submitted(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> Callable[..., Submitted]:
    def make(**keys: Any) -> Submitted:
        return Submitted(tmp_path / "training", cluster, slurm_paceline, **keys)

    return make


Make = Callable[..., Submitted]


def test_time_limit_killed_rank_dead_controller_dead_node(
    four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    """One run survives four faults over three job starts."""
    ours = submitted(gates="step-17,step-33,step-41", faults="27:3:kill")
    ours.submit()
    ours.at("step-17", ranks=4)
    ours.interrupt()
    ours.open("step-17")
    ours.restarted(1)
    assert ours.verdicts() == ["stopped"], ours.logs()
    # The second start: rank 3 is killed, and restarted in the same allocation.
    ours.at("step-33", ranks=4)
    assert ours.verdicts()[:2] == ["stopped", "failed"], ours.logs()
    assert ours.failure(2)["rank"] == 3
    assert ours.failure(2)["host"] != ours.cluster.show(ours.job)["BatchHost"]
    cluster.restart_controller(kill=True)
    ours.open("step-33")
    ours.at("step-41", ranks=4)
    assert cluster.restarts(ours.job) == 1
    lost = str(ours.failure(2)["host"])
    cluster.kill_node(lost, mark_down=True)
    ours.restarted(2)
    ours.open("step-41")
    ours.completes()
    assert ours.verdicts()[-1] == "done"
    assert_same(ours, four_undisturbed)
    shares = compute_goodput(ours.events())
    assert shares.seconds["queued"] > 5, shares  # Slurm delays requeued jobs
    assert shares.seconds["training"] > 0


# Knows no signals and no runtime, but finds its own state when it starts again.
RESUMES_BY_ITSELF = """
import os, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
state = out / f"state-{os.environ['RANK']}"
started_before = state.exists()
state.touch()
(out / f"at-start-{os.environ['RANK']}").touch()
time.sleep(0 if started_before else 3600)
"""


@pytest.mark.slow
def test_a_script_that_resumes_by_itself(submitted: Make, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(RESUMES_BY_ITSELF)
    ours = submitted(script=tmp_path / "plain.py")
    ours.submit("--style", "srun", "--requeue-always")
    ours.at("start", ranks=4)
    ours.interrupt()
    ours.completes()
    assert ours.verdicts() == ["stopped", "done"], ours.logs()
    assert cluster.restarts(ours.job) == 1
    log = ours.folder.slurm_log.read_text()
    assert "cannot save: progress since the script's own last checkpoint is lost" in log
    assert "continuing from the script's own checkpoint, if any" in log


@pytest.mark.slow
@pytest.mark.parametrize("style", ["srun", "torchrun", "spawn", "mpirun"])
def test_styles(style: str, four_undisturbed: Training, submitted: Make, cluster: Cluster) -> None:
    """Stops and kills have the same effect in every launch style."""
    ours = submitted(gates="step-17", faults="27:3:kill")
    if style == "spawn":
        ours.script_args.append("--spawn")
    ours.submit("--style", style)
    ours.at("step-17", ranks=4)
    ours.interrupt()
    ours.open("step-17")
    ours.completes()
    assert ours.verdicts() == ["stopped", "failed", "done"], ours.logs()
    assert ours.failure(2)["rank"] == 3
    assert cluster.restarts(ours.job) == 1
    assert_same(ours, four_undisturbed)


@pytest.mark.slow
def test_time_limit(four_undisturbed: Training, submitted: Make, cluster: Cluster) -> None:
    """Slurm itself sends the signal."""
    ours = submitted(gates="step-23")
    ours.submit("--grace", "100s")
    ours.at("step-23", ranks=4)
    cluster.run(["scontrol", "update", f"jobid={ours.job}", "endtime=now+105"])
    ours.wait_for_stop_request(0)
    ours.open("step-23")
    ours.completes()
    assert cluster.restarts(ours.job) == 1
    assert ours.verdicts() == ["stopped", "done"]
    assert_same(ours, four_undisturbed)


@pytest.mark.slow
def test_a_cancelled_run_stays_cancelled_and_can_be_resumed(
    four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    ours = submitted(gates="step-23")
    ours.submit()
    ours.at("step-23", ranks=4)
    cluster.run(["scancel", ours.job])
    ours.until(lambda: cluster.state(ours.job) in ENDED, "it does not end")
    ours.open("step-23")
    assert cluster.state(ours.job) == "CANCELLED"
    assert ours.checkpoints(), ours.logs()
    options = ("--nproc", "4", "--nodes", "1", "--here")
    done = ours.paceline("run", *options, "--resume", str(ours.folder.path), timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert cluster.restarts(ours.job) == 0
    assert_same(ours, four_undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "grace"])
def test_preempted(
    partition: str, four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    ours = submitted(gates="step-23")
    ours.submit("--partition", partition)
    ours.at("step-23", ranks=4)
    urgent = cluster.submit("sleep 600", "--partition=high", "--exclusive", "--nodes=4")
    if partition == "grace":
        ours.wait_for_stop_request(0)
        ours.open("step-23")
    ours.until(lambda: cluster.state(urgent) == "RUNNING", "the urgent job does not start")
    ours.restarted(1)
    ours.open("step-23")
    cluster.run(["scancel", urgent])
    ours.completes()
    assert_same(ours, four_undisturbed)


@pytest.mark.slow
def test_requeued_by_hand(four_undisturbed: Training, submitted: Make, cluster: Cluster) -> None:
    ours = submitted(gates="step-23")
    ours.submit()
    ours.at("step-23", ranks=4)
    cluster.run(["scontrol", "requeue", ours.job])
    ours.restarted(1)
    ours.open("step-23")
    ours.completes()
    assert cluster.restarts(ours.job) == 1
    assert_same(ours, four_undisturbed)


@pytest.mark.slow
def test_last_task_of_an_array(
    four_undisturbed: Training, submitted: Make, cluster: Cluster, tmp_path: Path
) -> None:
    """Its numeric job id is the array's, but only this task may be requeued."""
    ours = submitted(gates="step-23")
    script = tmp_path / "array.sbatch"
    done = ours.paceline(
        "submit",
        *SHAPE,
        "--script-only",
        str(script),
        str(SCRIPT),
        *ours.script_args,
        cwd=ours.home,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    whole = RunFolder(
        Path(
            next(
                line.split("=", 1)[1].split(" #")[0]
                for line in script.read_text().splitlines()
                if line.startswith("paceline_run=")
            )
        )
    )
    for task in "01":
        shutil.copytree(whole.path, tmp_path / "array" / task, symlinks=True)
    line = f"paceline_run={whole.path} "
    assert line in script.read_text()
    text = script.read_text().replace(line, f"paceline_run={tmp_path}/array/$SLURM_ARRAY_TASK_ID ")
    # The first task is another training, which must not be affected.
    first_out = tmp_path / "first"
    first_out.mkdir()
    launch_spec = tmp_path / "array" / "0" / "launch.json"
    launch_spec.write_text(launch_spec.read_text().replace(str(ours.out), str(first_out)))
    array = cluster.submit(text, "--array=0-1", output=tmp_path / "array.log")
    ours.job, ours.folder = f"{array}_1", RunFolder(tmp_path / "array" / "1")
    ours.at("step-23", ranks=4)
    ours.until(
        lambda: len(list(first_out.glob("at-step-23-*"))) == 4,
        "the first task does not reach the gate",
    )
    ours.interrupt()
    ours.open("step-23")
    ours.restarted(1)
    assert (cluster.state(f"{array}_0"), cluster.restarts(f"{array}_0")) == ("RUNNING", 0)
    (first_out / "go-step-23").touch()
    ours.completes()
    cluster.wait(f"{array}_0", "COMPLETED", timeout=TIMEOUT)
    assert cluster.restarts(f"{array}_0") == 0
    job_starts = sorted((ours.folder.path / "job-starts").iterdir())
    assert [read_verdict(job_start / "verdict") for job_start in job_starts] == ["stopped", "done"]
    assert_same(ours, four_undisturbed)
