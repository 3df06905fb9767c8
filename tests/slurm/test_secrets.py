"""Secrets of a job on a real Slurm: ranks get them, and no file, log or command shows them."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from paceline.contract.environment_file import REQUIRED
from tests.secret_leaks import in_files, in_text, plant_secrets, watch_command_lines
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of
from tests.until import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("without_torch")]
TIMEOUT = 300


@pytest.mark.parametrize("style", ["mpirun", pytest.param("fork", marks=pytest.mark.slow)])
def test_only_ranks_get_secrets(
    style: str, tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    if style == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("OpenMPI is not installed: openmpi-bin")
    planted = plant_secrets(tmp_path)
    shape = (
        "--style",
        style,
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--time",
        "10m",
        "--max-attempts",
        "1",
    )
    with watch_command_lines() as lines:
        done = slurm_paceline(
            "submit",
            *shape,
            *planted.args,
            cwd=planted.project,
            timeout=TIMEOUT,
            **planted.variables,
        )
        folder = run_of(done)
        job = folder.job.read_text().strip()
        work = folder.work / "project"
        reports = [work / f"report-{rank}.json" for rank in (0, 1)]
        until(
            lambda: all(path.exists() and path.read_text() for path in reports),
            "no reports",
            details=lambda: diagnostics(folder, done),
            within=TIMEOUT,
        )
        lines.scan()
        shown = [
            cluster.run(["scontrol", "show", "job", "--details", job]).stdout,
            cluster.run(["scontrol", "write", "batch_script", job, "-"]).stdout,
            cluster.run(["squeue", "--long", "--jobs", job]).stdout,
        ]
        assert in_text(folder.environment.read_text(), planted.values)
        assert stat.S_IMODE(folder.environment.stat().st_mode) == 0o600
        (work / "go").touch()
        cluster.wait(job, timeout=TIMEOUT)
    for path in reports:
        assert json.loads(path.read_text()) == planted.digests(), diagnostics(folder, done)
    for args in (("ps",), ("show", "last"), ("logs", "last"), ("doctor",)):
        completed = slurm_paceline(*args, cwd=planted.project, **planted.variables)
        shown += [completed.stdout, completed.stderr]
    assert "rank 1 fails" in "".join(shown), "the failure is shown, and checked here"
    for text in (done.stdout, done.stderr, *shown):
        assert not in_text(text, planted.values), text
    # All of scratch (script, launch spec, run.json, logs, events, snapshot), and Slurm's own files.
    assert "was removed when this run ended" in folder.environment.read_text()
    assert not in_files(scratch, planted.values)
    assert not in_files(cluster.folder, planted.values)
    # The submit command shows what the user typed; no process of the job does.
    job_lines = [line for line in lines.seen if " -m paceline submit " not in line]
    assert any("paceline.zip" in line for line in job_lines)
    if style == "mpirun":
        assert any("-x FROM_DOTENV" in line for line in job_lines)
    assert not [line for line in job_lines if in_text(line, planted.values)]


def test_no_secrets_stay_though_srun_ends_the_head_agent(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(1)\ntime.sleep(60)\n"
    config = """\
[environment]
secrets = ["A_KEY"]
[notify]
command = "sleep 8" # the other agent fails meanwhile, so srun ends all
on = ["failed"]
"""
    folder = project(tmp_path / "project", script, config=config)
    args = ["--nodes", "2", "--nproc", "1", "--cpu", "--time", "10m", "--max-attempts", "1"]
    done = slurm_paceline("submit", *args, "train.py", cwd=folder, A_KEY="hush-5d41402abc4b")
    run = run_of(done)
    cluster.wait(run.job.read_text().strip(), timeout=TIMEOUT)
    assert run.environment.read_text().endswith(REQUIRED.format("A_KEY")), diagnostics(run, done)


def test_dry_run_names_secrets(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    planted = plant_secrets(tmp_path)
    done = slurm_paceline(
        "submit", "--dry-run", *planted.args, cwd=planted.project, check=True, **planted.variables
    )
    assert "# secrets, whose values are only in environment.sh: FROM_DOTENV (.env)" in done.stdout
    assert not in_text(done.stdout + done.stderr, planted.values)
