"""`paceline sweep show` of trials in a real queue: they wait, and are missing once their job is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.slurm.harness import Cluster
from tests.slurm.runs import Completed, project
from tests.slurm.sweeps import GRID, QUICK, SCRIPT, sweep_of
from tests.until import until


def test_trials_in_the_queue(
    cluster: Cluster, slurm_paceline: Callable[..., Completed], tmp_path: Path
) -> None:
    home = project(tmp_path / "project", SCRIPT, config=QUICK)
    (home / "digits.toml").write_text(GRID)
    completed = slurm_paceline("sweep", "--sbatch-arg=--hold", "digits.toml", cwd=home, check=True)
    shown = slurm_paceline("sweep", "show", "digits", cwd=home, check=True)
    assert "\n12 pending of 12\n" in shown.stdout
    (job,) = [line["job"] for line in sweep_of(completed).read_jobs()]
    cluster.run(["scancel", f"{job}_[3-5]"])

    def text() -> str:
        """It shows an answer that is seconds old."""
        return slurm_paceline("sweep", "show", "digits", cwd=home, check=True).stdout

    until(lambda: "\n3 missing · 9 pending of 12\n" in text(), details=text)
    assert "again: paceline sweep --resubmit missing digits" in text()
