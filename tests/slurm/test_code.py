"""Which code a queued job runs: the snapshot from submission, or with --no-snapshot the current code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, Paceline, diagnostics, project, rank_reports, run_of

pytestmark = pytest.mark.timeout(600)
SMALL = ("--style", "srun", "--nproc", "1", "--cpu", "--time", "10m", "--sbatch-arg=--hold")


def test_code_changes_while_a_job_is_queued(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    home = project(tmp_path / "project", "import part\n" + PLAIN + "print('part', part.VALUE)\n")
    (home / "part.py").write_text("VALUE = 'then'\n")
    snapshotted = slurm_paceline("submit", *SMALL, "train.py", cwd=home, check=True)
    live = slurm_paceline("submit", *SMALL, "--no-snapshot", "train.py", cwd=home, check=True)
    (home / "part.py").write_text("VALUE = 'now'\n")
    folders = [run_of(completed) for completed in (snapshotted, live)]
    jobs = [folder.job.read_text().strip() for folder in folders]
    cluster.run(["scontrol", "release", *jobs])
    for folder, job, where, value in zip(folders, jobs, (folders[0].code, home), ("then", "now"), strict=True):
        assert cluster.wait(job, timeout=300) == "COMPLETED", diagnostics(folder)
        assert rank_reports(folder)[0]["file"] == str(where / "train.py")
        assert rank_reports(folder)[0]["environ"]["PACELINE_SOURCE_DIR"] == str(where)
        assert f"part {value}\n" in folder.attempt(1).log(0).read_text()
    assert not folders[1].code.exists()
    changed = slurm_paceline("show", str(folders[0].path), "--stat", cwd=home, check=True)
    assert changed.stdout == "~ part.py  +1 -1\n"
    in_place = slurm_paceline("show", str(folders[1].path), "--diff", cwd=home)
    assert in_place.returncode == 1
    assert "runs, or ran, in place" in in_place.stderr
