"""Sweeps on a real Slurm: arrays, resubmitted failures, small limits, pruning across nodes, TPE."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

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
    wait,
)


def test_a_grid_runs_four_at_a_time_and_failed_trials_are_resubmitted(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path, scratch: Path
) -> None:
    folder = project(
        tmp_path / "project", f"open('seen', 'a').write('again ')\n{SCRIPT}", config=QUICK
    )
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    completed = slurm_paceline("sweep", "--parallel", "4", "sweep.toml", cwd=folder, check=True)
    sweep = sweep_of(completed)
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
    # task ids are the trials' numbers
    assert sorted(sweep.read_jobs()[-1]["tasks"]) == sorted(map(str, failed))
    wait(cluster, sweep)
    assert states(sweep) == ["done"] * 12, explain(sweep)
    for number in found:  # failed trials resumed, the others did not run again
        more = 1 if number in failed else 0
        assert len(sweep.trial(number).attempts()) == attempts[number] + more
        # A trial works in a folder of its own, and leaves only what it has written.
        written = sweep.trial(number).work / "project"
        assert [path.name for path in written.iterdir()] == ["seen"]
        assert (written / "seen").read_text() == "again " * (attempts[number] + more)

    nothing = slurm_paceline("sweep", "--resubmit", "failed", "sweep", cwd=folder)
    assert nothing.returncode == 2
    assert "There are no failed trials in 'sweep'" in nothing.stderr
    (folder / "sweep.toml").write_text(GRID.replace("[0, 1, 2]", "[0, 1, 2, 7]"), encoding="utf-8")
    extended = slurm_paceline("sweep", "--count", "8", "sweep.toml", cwd=folder, check=True)
    # of the first eight of the larger grid, two are new
    assert "submitted 2 trials" in extended.stdout
    wait(cluster, sweep)
    assert [results(sweep)[number]["point"] for number in (12, 13)] == [
        {"x": 0, "y": 7},
        {"x": 1, "y": 7},
    ]


@pytest.mark.slow
def test_arrays_are_split_to_the_limits_of_the_cluster(
    sandbox: Cluster, paceline: Paceline, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT.replace("args.x == 2", "False"), config=QUICK)
    (folder / "sweep.toml").write_text(GRID, encoding="utf-8")
    with another(max_array_size=3) as made:
        args = ["sweep", "--parallel", "6", "--count", "7", "sweep.toml"]
        sweep = sweep_of(paceline(*args, cwd=folder, check=True, **made.environment))
        assert [len(line["tasks"]) for line in sweep.read_jobs()] == [3, 3, 1]
        assert wait(made, sweep) <= 6
    assert states(sweep) == ["done"] * 7, explain(sweep)
    assert len({result["value"] for result in results(sweep).values()}) == 7


PRUNED = """\
import paceline
with paceline.session(cpu=True, seed=0) as run:
    assert run.world_size == 4
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


@pytest.mark.slow  # tests/sweep/test_local_sweep.py prunes two ranks at once
def test_a_trial_of_two_nodes_is_pruned_on_all_ranks_at_once(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path
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
    # All ranks stopped on their own: the run is done in one attempt, and no job was requeued.
    assert [path.read_text().strip() for path in bad.path.glob("job-starts/*/verdict")] == ["done"]
    assert len(bad.attempts()) == 1
    for task in tasks_of(sweep):
        assert cluster.state(task) == "COMPLETED"
        assert cluster.restarts(task) == 0


TPE = """\
[sweep]
metric = "loss"
script = "train.py"
sampler = "tpe"
seed = 5
count = 40
parallel = 4
[space]
x = { uniform = [-3, 3] }
y = { uniform = [-3, 3] }
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tpe_finds_the_optimum_within_forty_trials(
    cluster: Cluster, slurm_paceline: Paceline, tmp_path: Path
) -> None:
    folder = project(tmp_path / "project", SCRIPT, config=QUICK)
    (folder / "search.toml").write_text(TPE, encoding="utf-8")
    sweep = sweep_of(slurm_paceline("sweep", "search.toml", cwd=folder, check=True))
    assert wait(cluster, sweep, timeout=800) <= 4
    found = results(sweep)
    assert states(sweep) == ["done"] * 40, explain(sweep)
    values = [result["value"] for result in found.values()]
    # 0 at (0.3, -0.5). Forty points at random with this seed come to 0.81, and none of the last twenty is below 1.
    assert min(values) < 0.25, sorted(values)[:5]
    assert sum(value < 1 for value in values[20:]) >= 3, values
    assert len({json.dumps(result["point"]) for result in found.values()}) == 40
