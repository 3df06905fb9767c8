"""Sweeps on a real Slurm: arrays, failures and their repetition, TPE, pruning across nodes, small limits, requeue."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.sandbox import PLAIN, Settings, missing
from paceline.trials import SweepFolder
from tests.slurm.harness import Cluster
from tests.slurm.runs import Typed, project

Type = Callable[..., Typed]

# No torch, and a launcher that starts a fresh process: as quick as Python itself.
QUICK = '[launch]\nstyle = "srun"\n[job]\nname = "trial"\n'

SCRIPT = """\
import argparse, os, pathlib, sys
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--y", type=float, default=0.0)
args = parser.parse_args()
if args.x == 2 and not pathlib.Path(os.environ["PACELINE_SCRATCH_DIR"], "mended").exists():
    raise ValueError(f"two is too much, with {args.y:g}")
paceline.report((args.x - 0.3) ** 2 + (args.y + 0.5) ** 2)
"""

GRID = """\
[sweep]
metric = "loss"
script = "train.py"
[space]
x = [0, 1, 2, 3]
y = [0, 1, 2]
"""


def sweep_of(typed: Typed) -> SweepFolder:
    paths = [line.split(None, 1)[1] for line in typed.stdout.splitlines() if line.startswith("  folder  ")]
    assert len(paths) == 1, f"{typed.stdout}\n{typed.stderr}"
    return SweepFolder(Path(paths[0]))


def results(sweep: SweepFolder) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sweep.trials.glob("*/result.json"):
        found[int(path.parent.name)] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def states(sweep: SweepFolder) -> list[str]:
    return [result["state"] for result in results(sweep).values()]


def tasks_of(sweep: SweepFolder) -> list[str]:
    return [f"{line['job']}_{index}" for line in sweep.read_jobs() for index in line["tasks"]]


def wait(cluster: Cluster, sweep: SweepFolder, *, timeout: float = 240) -> int:
    """Until every task has ended; how many ran at the same time, at the most."""
    tasks = tasks_of(sweep)
    deadline, most = time.monotonic() + timeout, 0
    while True:
        queued = cluster.run(["squeue", "-h", "--array", "-o", "%i %T"]).stdout.splitlines()
        most = max(most, sum(line.endswith(" RUNNING") for line in queued))
        if not {line.split()[0] for line in queued} & set(tasks):
            return most
        assert time.monotonic() < deadline, f"{queued}\n{explain(sweep)}"
        time.sleep(0.2)


def explain(sweep: SweepFolder) -> str:
    """All that could tell why trials failed."""
    logs = [*sweep.path.glob("submissions/*/logs/*"), *sweep.path.glob("trials/*/slurm.log")]
    texts = [f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs)]
    return "\n".join([f"results: {results(sweep)}", *texts])


def test_a_grid_runs_four_at_a_time_and_what_failed_is_submitted_again(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path, scratch: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT, config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    typed = slurm_paceline("sweep", "--parallel", "4", "sweep.toml", cwd=folder, check=True)
    sweep = sweep_of(typed)
    assert wait(cluster, sweep) <= 4
    assert len(sweep.read_jobs()) == 1
    found = results(sweep)
    assert len(found) == 12, explain(sweep)
    failed = [number for number, result in found.items() if result["state"] == "failed"]
    assert [found[number]["point"]["x"] for number in failed] == [2, 2, 2], explain(sweep)
    assert found[failed[0]]["error"] == "ValueError: two is too much, with 0"
    assert found[0]["value"] == pytest.approx(0.09 + 0.25)
    attempts = {number: len(sweep.trial(number).attempts()) for number in found}
    # One copy of the code and one run half for all; nothing is written per trial before it begins.
    assert len({os.path.realpath(sweep.trial(number).code) for number in found}) == 1

    (scratch / "mended").touch()
    again = slurm_paceline("sweep", "--resubmit", "failed", "sweep", cwd=folder, check=True)
    assert "submitted 3 trials" in again.stdout
    assert sorted(sweep.read_jobs()[-1]["tasks"]) == sorted(
        map(str, failed)
    )  # task ids are the trials' numbers
    wait(cluster, sweep)
    assert states(sweep) == ["done"] * 12, explain(sweep)
    for number in found:  # those that failed went on as themselves, the others were left alone
        more = 1 if number in failed else 0
        assert len(sweep.trial(number).attempts()) == attempts[number] + more

    nothing = slurm_paceline("sweep", "--resubmit", "failed", "sweep", cwd=folder)
    assert nothing.returncode == 2
    assert "no trial of 'sweep' is failed" in nothing.stderr
    (folder / "sweep.toml").write_text(GRID.replace("[0, 1, 2]", "[0, 1, 2, 7]"), encoding="utf-8")
    more_typed = slurm_paceline("sweep", "--count", "8", "sweep.toml", cwd=folder, check=True)
    assert "submitted 2 trials" in more_typed.stdout  # of the first eight of the larger grid, two are new
    wait(cluster, sweep)
    assert [results(sweep)[number]["point"] for number in (12, 13)] == [{"x": 0, "y": 7}, {"x": 1, "y": 7}]


@contextmanager
def another(**settings: Any) -> Iterator[Cluster]:
    """A second, smaller cluster, with settings of its own."""
    with tempfile.TemporaryDirectory(prefix="paceline-slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster.up(folder, nodes=2, gpus=0, network=PLAIN, owner=os.getpid(), **settings)
        try:
            yield made
        finally:
            made.down()


def test_arrays_are_cut_to_what_the_cluster_allows(sandbox: Cluster, paceline: Type, tmp_path: Path) -> None:
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    with another(max_array_size=5) as made:
        words = ["sweep", "--parallel", "6", "sweep.toml"]
        sweep = sweep_of(paceline(*words, cwd=folder, check=True, **made.environment))
        assert [len(line["tasks"]) for line in sweep.read_jobs()] == [5, 5, 2]
        assert wait(made, sweep) <= 6
    assert states(sweep) == ["done"] * 12, explain(sweep)
    assert len({result["value"] for result in results(sweep).values()}) == 12


PRUNED = """\
import paceline
with paceline.session(cpu=True, seed=0) as run:
    assert run.world == 4
    for epoch in run.epochs(6):
        run.report(loss=run.params.x + 1 / (epoch + 1), step=epoch)
        run.print(f"epoch {epoch}")
"""

HALVING = """\
[sweep]
metric = "loss"
script = "train.py"
prune = "halving"
parallel = 1
[space]
x = [0, 5]
[job]
nodes = 2
[launch]
nproc = 2
"""


def test_a_trial_of_two_nodes_is_pruned_on_all_ranks_at_once(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", PRUNED)
    (folder / "prune.toml").write_text(HALVING, encoding="utf-8")
    sweep = sweep_of(slurm_paceline("sweep", "prune.toml", cwd=folder, check=True))
    wait(cluster, sweep)
    assert states(sweep) == ["done", "pruned"], explain(sweep)
    good, bad = sweep.trial(0), sweep.trial(1)
    assert len(good.reports.read_text().splitlines()) == 6
    assert len(bad.reports.read_text().splitlines()) == 1
    assert bad.pruned.exists()
    assert results(sweep)[1]["value"] == pytest.approx(6.0)
    # All ranks left by themselves: the run is done, in one attempt, and no job went back into the queue.
    assert [path.read_text().strip() for path in bad.path.glob("legs/*/verdict")] == ["done"]
    assert len(bad.attempts()) == 1
    for task in tasks_of(sweep):
        assert cluster.state(task) == "COMPLETED"
        assert cluster.restarts(task) == 0


TPE = """\
[sweep]
metric = "loss"
script = "train.py"
sampler = "tpe"
count = 40
parallel = 4
[space]
x = { uniform = [-3, 3] }
y = { uniform = [-3, 3] }
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tpe_finds_the_optimum_within_forty_trials(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT, config=QUICK)
    (folder / "search.toml").write_text(TPE, encoding="utf-8")
    sweep = sweep_of(slurm_paceline("sweep", "search.toml", cwd=folder, check=True))
    assert wait(cluster, sweep, timeout=800) <= 4
    found = results(sweep)
    assert states(sweep) == ["done"] * 40, explain(sweep)
    values = [result["value"] for result in found.values()]
    # 0 at (0.3, -0.5). A point at random is that good once in about 180; ten at random come first.
    assert min(values) < 0.06, sorted(values)[:5]
    # It learned: the last twenty are nearer than the first.
    assert sorted(values[20:])[10] < sorted(values[:20])[10]
    assert len({json.dumps(result["point"]) for result in found.values()}) == 40


# Waits in its first attempt until it is asked to stop, as before a time limit; then it is done at once.
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


def until(condition: Callable[[], bool], sweep: SweepFolder, *, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, explain(sweep)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [1, 2])
def test_a_trial_whose_time_is_up_goes_on_as_itself(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path, pack: int
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    words = ["sweep", "--gpus", "1", "--cpus-per-gpu", "1", "--cpu", "--pack", str(pack), "sweep.toml"]
    sweep = sweep_of(slurm_paceline(*words, cwd=folder, check=True))
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
    assert attempts == [1, 2, 2, 2]  # what was done is not done again, also where it shares a job
    restarts = [cluster.restarts(task) for task in tasks_of(sweep)]
    assert restarts == ([0, 1, 1, 1] if pack == 1 else [1, 1])


def _gpus(sweep: SweepFolder, number: int) -> str:
    """Which GPUs a trial that runs has, by its launcher's environment."""
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


def allowed_few(sweep: SweepFolder, most: int) -> list[list[int]]:
    """What each task runs, which is all trials, in as few tasks as were allowed."""
    trials = [numbers for line in sweep.read_jobs() for numbers in line["tasks"].values()]
    assert [number for numbers in trials for number in numbers] == list(range(12))
    assert len(trials) <= most
    return trials


@pytest.mark.slow
def test_tasks_run_several_trials_where_the_cluster_holds_few_jobs(
    sandbox: Cluster, paceline: Type, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    with another(options={"MaxJobCount": "5"}) as made:
        sweep = sweep_of(paceline("sweep", "sweep.toml", cwd=folder, check=True, **made.environment))
        allowed_few(sweep, 4)
        wait(made, sweep)
    assert states(sweep) == ["done"] * 12, explain(sweep)


@pytest.mark.slow
def test_tasks_run_several_trials_where_an_account_may_submit_few_jobs(
    sandbox: Cluster, paceline: Type, tmp_path: Path
) -> None:
    if lacking := missing(Settings(accounting=True)):
        pytest.skip(f"no accounting to test: install {' '.join(lacking)}")
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    enforced = {"AccountingStorageEnforce": "associations,limits,qos"}
    with another(accounting=True, options=enforced) as made:
        user = getpass.getuser()
        made.run(["sacctmgr", "-i", "add", "account", "lab"])
        made.run(["sacctmgr", "-i", "add", "user", user, "account=lab", "maxsubmitjobs=5"])
        words = ["sweep", "--account", "lab", "sweep.toml"]
        sweep = sweep_of(paceline(*words, cwd=folder, check=True, **made.environment))
        allowed_few(sweep, 5)
        wait(made, sweep)
        assert states(sweep) == ["done"] * 12, explain(sweep)
        # A limit that no list of associations shows: sbatch refuses, and fewer tasks are tried.
        made.run(
            ["sacctmgr", "-i", "modify", "user", user, "where", "account=lab", "set", "maxsubmitjobs=-1"]
        )
        made.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "maxsubmitjobsperuser=2"])
        words = ["sweep", "--account", "lab", "--name", "second", "sweep.toml"]
        second = sweep_of(paceline(*words, cwd=folder, check=True, **made.environment))
        allowed_few(second, 2)
        wait(made, second)
    assert states(second) == ["done"] * 12, explain(second)


@pytest.mark.slow
def test_a_cancelled_sweep_stays_cancelled_until_it_is_wanted_again(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    sweep = sweep_of(slurm_paceline("sweep", "--parallel", "2", "sweep.toml", cwd=folder, check=True))
    until((sweep.trial(1).path / "began").exists, sweep)
    assert "cancelled sweep" in slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True).stdout
    wait(cluster, sweep)
    assert list(results(sweep)) == [0]
    typed = slurm_paceline("sweep", "--resubmit", "missing", "sweep", cwd=folder, check=True)
    assert "submitted 3 trials" in typed.stdout
    queued = slurm_paceline("sweep", "--resubmit", "missing", "sweep", cwd=folder)
    assert "no trial of 'sweep' is missing" in queued.stderr  # they are on their way
    until(lambda: len(list(sweep.path.glob("trials/[23]/began"))) >= 1, sweep)
    slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True)
    wait(cluster, sweep)
    assert results(sweep)[1]["step"] == 2  # it went on with its second attempt


@pytest.mark.slow
def test_where_jobs_are_not_requeued_a_new_one_goes_on_with_the_task(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", STOPPED, config=QUICK)
    (folder / "sweep.toml").write_text(FOUR, encoding="utf-8")
    sweep = sweep_of(slurm_paceline("sweep", "--parallel", "1", "sweep.toml", cwd=folder, check=True))
    slurm_paceline("sweep", "cancel", "sweep", cwd=folder, check=True)
    wait(cluster, sweep)
    sweep.cancelled.unlink()
    # By hand, as its head says.
    script = sweep.submission(1) / "job.sbatch"
    words = ["sbatch", "--parsable", "--no-requeue", "--array=3", str(script), "tasks-1"]
    job = cluster.run(words).stdout.strip()
    until((sweep.trial(3).path / "began").exists, sweep)
    cluster.run(["scancel", "--batch", "--signal=USR1", f"{job}_3"])
    until(sweep.trial(3).result.exists, sweep)
    assert results(sweep)[3]["step"] == 2
    assert sweep.trial(3).job.read_text().strip() != f"{job}_3"
    assert cluster.restarts(f"{job}_3") == 0


@pytest.mark.slow
@pytest.mark.parametrize("style", ["mpirun", "torchrun", "fork"])
def test_trials_of_two_nodes_in_other_styles(
    cluster: Cluster, slurm_paceline: Type, tmp_path: Path, style: str
) -> None:
    folder = project(tmp_path / "project", SCRIPT)
    (folder / "sweep.toml").write_text(GRID.replace("[0, 1, 2, 3]", "[1, 3]"), encoding="utf-8")
    words = ["sweep", "--style", style, "--nodes", "2", "--nproc", "2", "--count", "2", "--parallel", "1"]
    sweep = sweep_of(slurm_paceline(*words, "sweep.toml", cwd=folder, check=True))
    wait(cluster, sweep)
    assert states(sweep) == ["done", "done"], explain(sweep)
    for number in (0, 1):
        assert len(list(sweep.trial(number).attempt(1).path.glob("rank-*.log"))) == 4
        assert len(sweep.trial(number).reports.read_text().splitlines()) == 1
