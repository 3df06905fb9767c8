"""Tasks of a sweep: stopped, packed, limited, cancelled, and in other styles."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from paceline.contract.sweep_folder import SweepFolder
from paceline.tools.sandbox import Settings, missing_packages
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, project
from tests.slurm.sweeps import (
    GRID,
    QUICK,
    SCRIPT,
    another,
    explain,
    results,
    states,
    sweep_of,
    tasks_of,
    until,
    wait,
)

pytestmark = pytest.mark.slow

# Waits in its first attempt for a stop request, as before a time limit; then it completes at once.
STOPPED = """\
import argparse, os, pathlib, signal, sys, time
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=int)
args = parser.parse_args()
if args.x and os.environ["PACELINE_ATTEMPT"] == "1":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    pathlib.Path(os.environ["PACELINE_RUN"], "began").touch()
    time.sleep(600)
paceline.report(args.x, step=int(os.environ["PACELINE_ATTEMPT"]))
"""

FOUR = """\
[sweep]
script = "train.py"
[space]
x = [0, 1, 2, 3]
"""


@pytest.mark.parametrize("pack", [1, 2])
def test_a_trial_resumes_after_its_time_limit(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path, pack: int
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    args = [
        "sweep",
        "--gpus",
        "1",
        "--cpus-per-gpu",
        "1",
        "--cpu",
        "--pack",
        str(pack),
        "sweep.toml",
    ]
    sweep = sweep_of(slurm_paceline(*args, cwd=folder, check=True))
    (line,) = sweep.read_jobs()
    assert len(line["tasks"]) == 4 // pack
    until(lambda: all((sweep.trial(number).path / "began").exists() for number in (1, 2, 3)), sweep)
    seen = [_gpus(sweep, number) for number in (1, 2, 3)]
    assert all(seen)
    if pack == 2:  # those that share a node have GPUs of their own
        assert seen[1] != seen[2], seen
    for task in (f"{line['job']}_{index}" for index in line["tasks"]):
        cluster.run(["scancel", "--batch", "--signal=USR1", task], check=False)
    until(lambda: len(results(sweep)) == 4, sweep)
    wait(cluster, sweep)
    assert states(sweep) == ["done"] * 4, explain(sweep)
    assert [result["step"] for result in results(sweep).values()] == [1, 2, 2, 2]
    attempts = [len(sweep.trial(number).attempts()) for number in range(4)]
    assert attempts == [1, 2, 2, 2]  # finished trials do not run again, even if they share a job
    restarts = [cluster.restarts(task) for task in tasks_of(sweep)]
    assert restarts == ([0, 1, 1, 1] if pack == 1 else [1, 1])


def _gpus(sweep: SweepFolder, number: int) -> str:
    """Return the GPUs of a running trial, from its agent's environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PACELINE_RUN={sweep.trial(number).path}".encode() in variables:
            for each in variables:
                if each.startswith(b"CUDA_VISIBLE_DEVICES=") and b"RANK=0" in variables:
                    return each.decode()
    return ""


def allowed_few(sweep: SweepFolder, maximum: int) -> list[list[int]]:
    """Return the trials of each task; together they are all trials, in as few tasks as allowed."""
    trials = [numbers for line in sweep.read_jobs() for numbers in line["tasks"].values()]
    assert [number for numbers in trials for number in numbers] == list(range(12))
    assert len(trials) <= maximum
    return trials


def test_tasks_run_several_trials_where_the_cluster_holds_few_jobs(
    sandbox: Cluster, paceline: Paceline, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    with another(options={"MaxJobCount": "5"}) as made:
        sweep = sweep_of(
            paceline("sweep", "sweep.toml", cwd=folder, check=True, **made.environment)
        )
        allowed_few(sweep, 4)
        wait(made, sweep)
    assert states(sweep) == ["done"] * 12, explain(sweep)


def test_tasks_run_several_trials_where_an_account_may_submit_few_jobs(
    sandbox: Cluster, paceline: Paceline, tmp_path: Path
) -> None:
    if lacking := missing_packages(Settings(accounting=True)):
        pytest.skip(f"no accounting to test: install {' '.join(lacking)}")
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    enforced = {"AccountingStorageEnforce": "associations,limits,qos"}
    with another(accounting=True, options=enforced) as made:
        user = getpass.getuser()
        made.run(["sacctmgr", "-i", "add", "account", "lab"])
        made.run(["sacctmgr", "-i", "add", "user", user, "account=lab", "maxsubmitjobs=5"])
        args = ["sweep", "--account", "lab", "sweep.toml"]
        sweep = sweep_of(paceline(*args, cwd=folder, check=True, **made.environment))
        allowed_few(sweep, 5)
        wait(made, sweep)
        assert states(sweep) == ["done"] * 12, explain(sweep)
        # A limit that no list of associations shows: sbatch refuses, and fewer tasks are tried.
        made.run(
            [
                "sacctmgr",
                "-i",
                "modify",
                "user",
                user,
                "where",
                "account=lab",
                "set",
                "maxsubmitjobs=-1",
            ]
        )
        made.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "maxsubmitjobsperuser=2"])
        args = ["sweep", "--account", "lab", "--name", "second", "sweep.toml"]
        second = sweep_of(paceline(*args, cwd=folder, check=True, **made.environment))
        allowed_few(second, 2)
        wait(made, second)
    assert states(second) == ["done"] * 12, explain(second)


def test_a_cancelled_sweep_stays_cancelled_until_resubmitted(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    sweep = sweep_of(
        slurm_paceline("sweep", "--parallel", "2", "sweep.toml", cwd=folder, check=True)
    )
    until((sweep.trial(1).path / "began").exists, sweep)
    until(sweep.trial(0).result.exists, sweep)  # the other task
    assert (
        "cancelled sweep"
        in slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True).stdout
    )
    wait(cluster, sweep)
    assert list(results(sweep)) == [0]
    completed = slurm_paceline("sweep", "--resubmit", "missing", "sweep", cwd=folder, check=True)
    assert "submitted 3 trials" in completed.stdout
    queued = slurm_paceline("sweep", "--resubmit", "missing", "sweep", cwd=folder)
    assert "There are no missing trials in 'sweep'" in queued.stderr  # they are queued
    until(lambda: len(list(sweep.path.glob("trials/[23]/began"))) >= 1, sweep)
    until(sweep.trial(1).result.exists, sweep)
    slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True)
    wait(cluster, sweep)
    assert results(sweep)[1]["step"] == 2  # it continued in its second attempt


def test_without_requeueing_a_new_job_continues_the_task(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    sweep = sweep_of(
        slurm_paceline("sweep", "--parallel", "1", "sweep.toml", cwd=folder, check=True)
    )
    slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True)
    wait(cluster, sweep)
    sweep.cancelled.unlink()
    # Manually, as its header says.
    script = sweep.submission(1) / "job.sbatch"
    args = ["sbatch", "--parsable", "--no-requeue", "--array=3", str(script), "tasks-1"]
    job = cluster.run(args).stdout.strip()
    until((sweep.trial(3).path / "began").exists, sweep)
    cluster.run(["scancel", "--batch", "--signal=USR1", f"{job}_3"])
    until(sweep.trial(3).result.exists, sweep)
    assert results(sweep)[3]["step"] == 2
    assert sweep.trial(3).job.read_text().strip() != f"{job}_3"
    assert cluster.restarts(f"{job}_3") == 0


@pytest.mark.parametrize("style", ["mpirun", "torchrun", "fork"])
def test_trials_of_two_nodes_in_other_styles(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path, style: str
) -> None:
    folder = project(tmp_path / "project", SCRIPT)
    (folder / "sweep.toml").write_text(GRID.replace("[0, 1, 2, 3]", "[1, 3]"), encoding="utf-8")
    args = [
        "sweep",
        "--style",
        style,
        "--nodes",
        "2",
        "--nproc",
        "2",
        "--count",
        "2",
        "--parallel",
        "1",
    ]
    sweep = sweep_of(slurm_paceline(*args, "sweep.toml", cwd=folder, check=True))
    wait(cluster, sweep)
    assert states(sweep) == ["done", "done"], explain(sweep)
    for number in (0, 1):
        assert len(list(sweep.trial(number).attempt(1).path.glob("rank-*.log"))) == 4
        assert len(sweep.trial(number).reports.read_text().splitlines()) == 1
