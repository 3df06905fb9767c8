"""Staging on a real Slurm: two nodes, data reused, results collected however the job ends, nothing left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.contract.run_folder import RunFolder
from paceline.staging.cleanup import Owner, make_private_folder, make_run_folder
from paceline.tools.sandbox import NAMESPACES
from tests.slurm.harness import ENDED, Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of
from tests.until import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("without_torch")]
TIMEOUT = 400
TINY = ("--style", "srun", "--gpus", "1", "--cpu", "--time", "10m", "--cpus-per-gpu", "1")
SMALL = (*TINY, "--nodes", "2")

SCRIPT = """\
import os, sys, time
from pathlib import Path
data, rank = Path(os.environ["PACELINE_DATA"]), os.environ["RANK"]
assert sum(path.is_file() for path in (data / "set").rglob("*")) == 100
assert (data / "set").stat().st_uid == os.geteuid()
(data / "out").mkdir(exist_ok=True)
(data / "out" / "result.txt").write_text(rank)
print("ready", flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep(600)
"""


def staged(folder: RunFolder) -> list[dict[str, Any]]:
    lines = [
        line for path in folder.events.glob("agent-*") for line in path.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["event"] == "staged"]


def results(folder: RunFolder) -> dict[str, str]:
    paths = folder.collected.rglob("*.txt")
    return {str(path.relative_to(folder.collected)): path.read_text() for path in paths}


def test_staged_on_two_nodes_cancelled_collected_and_used_again(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    config = (
        '[project]\nname = "p"\n[data]\nstage = ["set"]\ncollect = ["out/*.txt"]\nkeep = "2h"\n'
        f'folder = "{tmp_path}/disks/$SLURMD_NODENAME"\n'
    )
    home = project(tmp_path / "project", SCRIPT, config=config)

    missing = slurm_paceline("submit", *SMALL, "train.py", cwd=home)
    assert missing.returncode == 2
    assert f"'{scratch / 'p' / 'set'}' does not exist" in missing.stderr

    for number in range(100):
        path = scratch / "p" / "set" / f"class {number % 3}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * number)

    first = run_of(
        slurm_paceline("submit", *SMALL, "--no-requeue", "train.py", "wait", cwd=home, check=True)
    )
    job = first.job.read_text().strip()
    logs = [first.attempt(1).log(rank) for rank in (0, 1)]
    until(
        lambda: all(log.exists() and "ready" in log.read_text() for log in logs),
        "no data is staged",
        details=lambda: diagnostics(first),
    )
    assert [event["files"] for event in staged(first)] == [100, 100]
    nodes = sorted(path.name for path in (tmp_path / "disks").iterdir())
    assert len(nodes) == 2
    cluster.run(["scancel", job])
    assert cluster.wait(job, timeout=TIMEOUT) == "CANCELLED"

    again = slurm_paceline(
        "submit",
        *SMALL,
        "--nodelist",
        ",".join(nodes),
        "--wait",
        "train.py",
        cwd=home,
        timeout=TIMEOUT,
    )
    second = run_of(again)
    assert again.returncode == 0, diagnostics(second, again)
    assert [(event["files"], event["reused"]) for event in staged(second)] == [(0, 4950), (0, 4950)]
    expected = {"node-0/out/result.txt": "0", "node-1/out/result.txt": "1"}
    assert results(second) == expected, diagnostics(second, again)
    # Collected within the grace period of the cancel, or by the next run if this machine was too slow.
    assert results(first) == expected, diagnostics(first)
    for node in nodes:
        assert sorted(path.name for path in (tmp_path / "disks" / node).glob("paceline-*/*")) == [
            "cache"
        ]


def test_clean_on_a_node_spares_running_jobs(tmp_path: Path, cluster: Cluster) -> None:
    """One job was killed and left its folder; another still runs and has its own beside it."""
    live = cluster.submit("sleep 600", "--nodes=1", "--ntasks=1", "--cpus-per-task=1")
    cluster.wait(live, "RUNNING", timeout=TIMEOUT)
    node = cluster.show(live)["NodeList"]
    private = make_private_folder(tmp_path)
    for job in (live, "999999"):
        owner = Owner(run="r", job_start=f"{job}-0", node=0, host=node, job=job)
        make_run_folder(private / f"run-{job}", owner)
    paceline = [sys.executable, "-m", "paceline", "clean", "--folder", str(tmp_path)]
    args = ["srun", "--quiet", f"--nodelist={node}", "--ntasks=1", *paceline]
    shown = cluster.run(args, timeout=TIMEOUT)
    assert "run-999999  (job 999999 is over)" in shown.stdout
    assert f"run-{live}" not in shown.stdout
    assert len(list(private.iterdir())) == 2
    cluster.run([*args, "--yes"], timeout=TIMEOUT)
    assert [path.name for path in private.iterdir()] == [f"run-{live}"]


# Prints what it was given, writes a result, and waits or dies.
ODD = "a name with spaces\nand a newline"
ENDING = """\
import os, signal, sys, time
from pathlib import Path
data = Path(os.environ["PACELINE_DATA"])
odd = data / "a name with spaces\\nand a newline"
print("near", (odd / "near").resolve() == (odd / "file").resolve(), flush=True)
print("far", os.readlink(odd / "far"), flush=True)
(data / "out").mkdir()
(data / "out" / "result.txt").write_text((odd / "file").read_text())
print("ready", flush=True)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.fixture
def home(tmp_path: Path, scratch: Path) -> Path:
    """A project whose data has an odd name, a link inside it, and one that points outside."""
    odd_folder = scratch / "p" / ODD
    odd_folder.mkdir(parents=True)
    (odd_folder / "file").write_text("42")
    (odd_folder / "near").symlink_to(odd_folder / "file")
    (odd_folder / "far").symlink_to(tmp_path)
    config = (
        f'[project]\nname = "p"\n[data]\nstage = [{json.dumps(ODD)}]\ncollect = ["out"]\n'
        f'folder = "{tmp_path}/disks/$SLURMD_NODENAME"\n'
    )
    return project(tmp_path / "project", ENDING, config=config)


class Job:
    """A run of that project, and its folder on the node's disk."""

    def __init__(self, home: Path, cluster: Cluster, paceline: Paceline, *args: str) -> None:
        self.cluster, self.disks = cluster, home.parent / "disks"
        self.run = run_of(paceline("submit", *TINY, "--nodes", "1", *args, cwd=home, check=True))
        self.id = self.run.job.read_text().strip()

    def until(self, holds: Callable[[], object], what: str) -> None:
        until(
            holds,
            what,
            details=lambda: f"{self.cluster.show(self.id)}\n{diagnostics(self.run)}",
            within=TIMEOUT,
            pause=0.2,
        )

    def ready(self) -> None:
        log = self.run.attempt(1).log(0)
        self.until(
            lambda: log.exists() and "ready" in log.read_text(), "the script does not get this far"
        )

    def ended(self) -> str:
        self.until(lambda: self.cluster.state(self.id) in ENDED, "the job does not end")
        return self.cluster.state(self.id)

    def kill(self) -> None:
        """Kill all its processes at once, the batch shell first; scancel would let them clean up."""
        found = self.cluster.processes(self.id)
        assert len(found) > 2, found
        # Stopped processes do not react to the end of the others.
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for process in sorted(found, key=lambda each: each.pid):
                with suppress(psutil.Error):
                    act(process)

    def left(self) -> list[Path]:
        return list(self.disks.glob(f"*/paceline-*/run-{self.run.path.name}-*"))

    def check_results(self) -> None:
        """The result was collected, and nothing of the run is on any disk."""
        self.until(lambda: results(self.run) and not self.left(), "no result, or leftovers")
        assert results(self.run) == {"out/result.txt": "42"}


def test_the_next_job_cleans_up_after_killed_jobs_and_spares_running_ones(
    home: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    living = Job(home, cluster, slurm_paceline, "train.py", "wait")
    living.ready()
    same_node = ("--no-requeue", "--nodelist", cluster.show(living.id)["NodeList"])
    killed = Job(home, cluster, slurm_paceline, *same_node, "train.py", "wait")
    killed.ready()
    log = killed.run.attempt(1).log(0).read_text()
    assert "near True" in log
    assert f"far {home.parent}\n" in log
    killed.kill()
    killed.ended()
    assert killed.left(), diagnostics(killed.run)  # nothing cleaned up
    assert not results(killed.run)
    # The next job's script is killed too: its result must not be lost either.
    after = Job(home, cluster, slurm_paceline, *same_node, "train.py", "die")
    assert after.ended() == "FAILED", diagnostics(after.run)
    after.check_results()
    killed.check_results()
    assert len(living.left()) == 1
    assert cluster.state(living.id) == "RUNNING"
    console = after.run.slurm_log.read_text()
    assert "removed 1 folders that earlier runs left" in console
    assert "1 links in 'a name with spaces\\nand a newline' point outside it" in console
    cluster.run(["scancel", living.id])
    living.check_results()


@contextmanager
def small_disk_of(node: str, folder: Path, cluster: Cluster) -> Iterator[None]:
    """Mount a file system of 2 MB on a node, which has its own mounts. Skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "paceline-test", str(folder)]
    if cluster.record.settings.network != NAMESPACES or cluster.exec(node, mount).returncode:
        pytest.skip("cannot mount a small file system on a node here")
    try:
        yield
    finally:
        cluster.exec(node, ["umount", "--lazy", str(folder)])


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_an_error_before_anything_is_copied(
    home: Path, tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    (scratch / "p" / ODD / "huge").write_bytes(bytes(range(256)) * (8 << 12))  # 8 MiB
    with small_disk_of("node1", tmp_path / "disks", cluster):
        job = Job(home, cluster, slurm_paceline, "--nodelist", "node1", "train.py", "wait")
        assert job.ended() == "FAILED"
        output = diagnostics(job.run)
        node = cluster.show(job.id)["NodeList"]
        assert f"Node {node}: the data needs 8.4 MB, but {job.disks}" in output
        assert "Stage less, set folder in [data] to a larger disk" in output
        assert not job.run.attempt(1).log(0).exists(), output
        files = cluster.exec("node1", ["find", str(job.disks), "-type", "f"]).stdout
        assert not [name for name in files.split() if name.endswith("/huge")], files
        assert f"run-{job.run.path.name}" not in files
        shown = slurm_paceline("show", str(job.run.path), check=True)
        assert "the data needs 8.4 MB" in shown.stdout


@pytest.mark.slow
def test_results_come_back_at_the_time_limit(
    home: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    job = Job(home, cluster, slurm_paceline, "--no-requeue", "train.py", "wait")
    job.ready()
    cluster.run(["scontrol", "update", f"jobid={job.id}", "endtime=now+45"])
    assert job.ended() != "COMPLETED"
    job.check_results()


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "grace"])
def test_results_come_back_before_a_preempted_job_runs_again(
    partition: str, home: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    job = Job(home, cluster, slurm_paceline, "--partition", partition, "train.py", "wait")
    job.ready()
    urgent = cluster.submit("sleep 600", "--partition=high", "--exclusive", "--nodes=4")
    job.until(lambda: cluster.state(urgent) == "RUNNING", "the urgent job does not start")
    job.check_results()
