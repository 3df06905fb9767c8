"""`paceline top` on a real Slurm: a job that waits, runs, is requeued by a key, and is done."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.contract.run_folder import STOPPED
from paceline.ui.terminal import app as top
from paceline.watch.run_status import newest_verdict
from tests.slurm.harness import Cluster
from tests.slurm.runs import project, run_of
from tests.ui.terminal.screen import Screen, drive

pytestmark = pytest.mark.timeout(600)

SCRIPT = """\
import time
from pathlib import Path
import paceline

with paceline.session(cpu=True, report=False, progress=False) as run:
    run.resume()
    for step in run.steps(range(100000)):
        run.log(loss=10 / (step + 1))
        if Path({finish!r}).exists():
            break
        time.sleep(0.05)
print("all steps are done", flush=True)
"""


@pytest.fixture
def here(cluster: Cluster) -> Iterator[None]:
    """Ask this cluster from this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        patch.setattr(top, "LIST_INTERVAL", 1.0)
        yield


@pytest.mark.slow
def test_a_job_that_waits_runs_is_requeued_and_is_done(
    cluster: Cluster,
    slurm_paceline: Callable[..., subprocess.CompletedProcess[str]],
    scratch: Path,
    tmp_path: Path,
    here: None,
) -> None:
    finish = tmp_path / "finish"
    folder = project(tmp_path / "project", SCRIPT.format(finish=str(finish)))
    filler = cluster.submit("sleep 600", "--nodes=4", "--exclusive")
    cluster.wait(filler, "RUNNING")
    done = slurm_paceline(
        "submit", "--nproc", "1", "--cpu", "--name", "tiny", "train.py", cwd=folder, check=True
    )
    job = run_of(done).job.read_text().strip()

    async def work(screen: Screen) -> None:
        await screen.until("tiny", "queued", "1 queued", f"job {job}")
        await screen.press("r")
        await screen.until(f"is queued and cannot be requeued. It is job {job}.")
        await screen.press("s")
        await screen.until("has nothing to save")
        cluster.run(["scancel", filler])
        await screen.until("running", "1 running", "loss", "training", "CPU")
        await screen.press("r")
        await screen.until(f"Requeue run {run_of(done).path.name} (tiny, job {job})?")
        await screen.press("y")
        await screen.until("saves and requeues itself")
        await screen.until("attempt 2", "running")
        assert not run_of(done).cancelled.exists()
        finish.touch()
        await screen.until("done", "1 over", "all steps are done")

    drive(scratch, work, size=(120, 40))


@pytest.mark.slow  # the browser's buttons do the same: tests/slurm/test_ui.py
def test_keys_stop_submit_again_and_cancel_a_job(
    cluster: Cluster,
    slurm_paceline: Callable[..., subprocess.CompletedProcess[str]],
    scratch: Path,
    tmp_path: Path,
    here: None,
) -> None:
    folder = project(tmp_path / "project", SCRIPT.format(finish=str(tmp_path / "never")))
    done = slurm_paceline(
        "submit", "--nproc", "1", "--cpu", "--name", "tiny", "train.py", cwd=folder, check=True
    )
    run = run_of(done)
    name, job = run.path.name, run.job.read_text().strip()

    async def work(screen: Screen) -> None:
        await screen.until("tiny", "1 running", "training")
        await screen.press("s")
        await screen.until(f"Let run {name} (tiny, job {job})", "It saves a checkpoint first.")
        await screen.press("y")
        await screen.until("saves and stops")
        await screen.until("1 over", gone="1 running")
        cluster.wait(job)
        assert newest_verdict(run) == STOPPED
        await screen.press("r")
        await screen.until(f"Submit run {name} (tiny, job {job}) again?")
        await screen.press("y")
        await screen.until(f"{name}: submitted again, job")
        again = run.job.read_text().strip()
        assert again != job
        await screen.until("1 running", f"job {again}", "attempt 2")
        await screen.press("c")
        await screen.until(f"Cancel run {name} (tiny, job {again}) now?")
        await screen.press("y")
        await screen.until(f"{name} is cancelled")
        await screen.until("1 over", gone="1 running")
        assert cluster.wait(again) == "CANCELLED"

    drive(scratch, work, size=(120, 40))
