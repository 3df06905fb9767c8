"""How often Paceline asks the controller, by the controller's own count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.watch.records import read_record
from paceline.watch.run_status import OVER, newest_verdict
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of
from tests.watch.test_records import make_run

WATCHERS = 100
INTERVAL = 1.0  # seconds; the default is 60
TIMEOUT = 120

# Processes that look at a run at the same moment, and exit with 0 if it is running.
LOOK = f"""\
import os, sys
from pathlib import Path
from paceline.contract.run_folder import RunFolder
from paceline.watch.records import read_record

def look():
    os.read(gate, 1)
    os._exit(read_record(RunFolder(Path(sys.argv[1]))).status != "running")

gate, opener = os.pipe()
pids = [os.fork() or look() for _ in range({WATCHERS})]
os.write(opener, b"x" * {WATCHERS})
print([os.waitpid(pid, 0)[1] for pid in pids].count(0))
"""


def count_calls(cluster: Cluster) -> int:
    """Return how often the controller was asked for the queue so far. The harness itself asks for single jobs."""
    found = re.findall(
        r"REQUEST_JOB(?:_USER)?_INFO\s*\(\s*\d+\)\s*count:(\d+)", cluster.run(["sdiag"]).stdout
    )
    return sum(map(int, found))


def running(cluster: Cluster, tmp_path: Path) -> RunFolder:
    """A run whose job sleeps."""
    job = cluster.submit("sleep 600")
    cluster.wait(job, "RUNNING")
    return make_run(tmp_path / "scratch", job=job)


def environment(cluster: Cluster, tmp_path: Path, interval: float) -> dict[str, str]:
    variables = {
        "PACELINE_SCRATCH": str(tmp_path / "scratch"),
        "PACELINE_POLL_INTERVAL": str(interval),
    }
    return {**os.environ, **cluster.environment, **variables}


def test_a_hundred_watchers_at_once_make_one_call(cluster: Cluster, tmp_path: Path) -> None:
    folder = running(cluster, tmp_path)
    before = count_calls(cluster)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(folder.path)],
        env=environment(cluster, tmp_path, 60.0),
        text=True,
        capture_output=True,
        timeout=TIMEOUT,
    )
    assert done.stdout == f"{WATCHERS}\n", done.stderr
    assert count_calls(cluster) - before == 1


def test_following_a_run_asks_once_per_interval_and_ends_with_the_verdict(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = running(cluster, tmp_path)
    before, began = count_calls(cluster), time.monotonic()
    follower = subprocess.Popen(
        [sys.executable, "-m", "paceline", "logs", "-f", str(folder.path)],
        env=environment(cluster, tmp_path, INTERVAL),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while time.monotonic() < began + 6 * INTERVAL or count_calls(cluster) - before < 2:
        assert follower.poll() is None, follower.communicate()[1]
        time.sleep(0.2)
    job = folder.job.read_text().strip()
    cluster.run(["scancel", job])
    cluster.wait(job)
    folder.job_start(f"{job}-0").verdict.write_text("done\n")
    assert follower.wait(TIMEOUT) == 0
    follower.communicate()
    assert 2 <= count_calls(cluster) - before <= (time.monotonic() - began) / INTERVAL + 5


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_old_answers_never_say_that_a_requeued_run_is_over(
    cluster: Cluster, tmp_path: Path, slurm_paceline: Paceline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an answer that counts for a minute, through a requeue to the end."""
    gate = tmp_path / "gate"
    script = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.1)\n"
    home = project(tmp_path / "project", script)
    long = {"PACELINE_POLL_INTERVAL": "60"}
    args = ("submit", "--gpus", "1", "--cpu", "--time", "10m", "train.py")
    folder = run_of(slurm_paceline(*args, cwd=home, check=True, **long))
    job = folder.job.read_text().strip()
    found: dict[str, str] = {}  # statuses, and how each came first

    def watch_until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not reached():
            assert time.monotonic() < deadline, f"{found}: {diagnostics(folder)}"
            record = read_record(folder)
            found.setdefault(record.status, f"{record.state}, {newest_verdict(folder)}")
            time.sleep(0.1)

    with monkeypatch.context() as patch:
        for name, value in {**cluster.environment, **long}.items():
            patch.setenv(name, value)
        before = count_calls(cluster)
        watch_until(lambda: len(folder.attempts()) == 1 and folder.attempts()[0].log(0).exists())
        cluster.run(["scontrol", "requeue", job])
        watch_until(lambda: cluster.restarts(job) == 1 and cluster.state(job) == "RUNNING")
        watch_until(lambda: len(folder.attempts()) == 2 and folder.attempts()[1].log(0).exists())
        assert read_record(folder).status == "running"
        assert not OVER & found.keys(), found
        gate.touch()
        watch_until(lambda: read_record(folder).is_over)
        assert read_record(folder).status == "done"
        assert count_calls(cluster) - before < 20
