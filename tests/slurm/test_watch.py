"""`logs -f`, `wait` and notifications on a real Slurm: a job that waits, runs, is requeued by Slurm, and is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import diagnostics, project, run_of
from tests.until import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("without_torch")]

SCRIPT = """\
import os, time
from pathlib import Path
print("rank", os.environ["RANK"], "starts", flush=True)
while not Path({finish!r}).exists():
    time.sleep(0.1)
print("rank", os.environ["RANK"], "ends", flush=True)
"""


def test_a_job_is_followed_through_the_queue_and_a_requeue(
    cluster: Cluster,
    slurm_paceline: Callable[..., subprocess.CompletedProcess[str]],
    scratch: Path,
    tmp_path: Path,
) -> None:
    finish, told = tmp_path / "finish", tmp_path / "told"
    config = f'[notify]\ncommand = \'cat >> {told}\'\non = ["requeued", "done", "failed"]\n'
    folder = project(tmp_path / "project", SCRIPT.format(finish=str(finish)), config=config)
    filler = cluster.submit("sleep 600", "--nodes=4", "--exclusive")
    cluster.wait(filler, "RUNNING")
    done = slurm_paceline(
        "submit", "--nproc", "2", "--cpu", "--requeue-always", "train.py", cwd=folder, check=True
    )
    run = run_of(done)
    job = run.job.read_text().strip()
    environment = {
        **os.environ,
        **cluster.environment,
        "PACELINE_SCRATCH": str(scratch),
        "PACELINE_POLL_INTERVAL": "2",
    }
    with open(tmp_path / "followed", "w") as out, open(tmp_path / "notes", "w") as err:
        following = subprocess.Popen(
            [sys.executable, "-m", "paceline", "logs", "-f", run.path.name],
            env=environment,
            stdout=out,
            stderr=err,
        )
    with open(tmp_path / "waited", "w") as out:
        waiting = subprocess.Popen(
            [sys.executable, "-m", "paceline", "wait", run.path.name], env=environment, stdout=out
        )
    try:
        until(lambda: "is queued" in (tmp_path / "notes").read_text(), "why it waits")
        until(
            lambda: "queued" in (tmp_path / "waited").read_text(), "the other command sees it too"
        )
        cluster.run(["scancel", filler])
        until(lambda: (tmp_path / "followed").read_text().count("starts") == 2, "both ranks")
        cluster.run(["scontrol", "requeue", job])
        until(lambda: (tmp_path / "followed").read_text().count("starts") == 4, diagnostics(run))
        finish.touch()
        assert waiting.wait(120) == 0, diagnostics(run)
        assert following.wait(120) == 0
    finally:
        for process in (following, waiting):
            process.kill()
            process.wait()
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [each["event"] for each in events] == ["requeued", "done"], diagnostics(run)
    assert {each["run_id"] for each in events} == {run.path.name}
    lines = (tmp_path / "followed").read_text().splitlines()
    assert sorted(lines[:2]) == ["[0] rank 0 starts", "[1] rank 1 starts"]
    assert any(line == "--- attempt 2 ---" for line in lines)
    assert sorted(lines[-2:]) == ["[0] rank 0 ends", "[1] rank 1 ends"]
    waited = (tmp_path / "waited").read_text().splitlines()
    assert waited[0].startswith(f"{run.path.name}: queued")
    assert waited[-1].startswith(f"{run.path.name}: done")
