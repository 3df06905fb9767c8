"""A sandbox is a real cluster with jobs, arrays, GPUs and faults, and `down` leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.errors import EnvironmentProblem, PacelineError, UsageError
from paceline.tools.sandbox import (
    NAMESPACES,
    PLAIN,
    Sandbox,
    Settings,
    missing_packages,
    network,
    packages,
)
from tests.adversary.second_user import STRANGER, call_as
from tests.slurm.harness import Cluster, is_orphaned
from tests.until import until

pytestmark = pytest.mark.slurm
ROOT = os.geteuid() == 0
BEST = NAMESPACES if ROOT else PLAIN
NETWORKS = [
    PLAIN,
    pytest.param(NAMESPACES, marks=pytest.mark.skipif(not ROOT, reason="namespaces need root")),
]


@pytest.fixture(autouse=True)
def installed() -> None:
    if missing := missing_packages(Settings(network=BEST)):
        pytest.skip(f"no Slurm to test on: install {' '.join(missing)}")


def processes_of(folder: Path) -> list[str]:
    """Return the processes of a sandbox: its folder is in the command line or the environment of each."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(str(folder) in text for text in texts):
            found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def interfaces_of(folder: Path) -> set[str]:
    """Return the bridge and the cables of one sandbox; this machine may run others."""
    return {path.name for path in Path("/sys/class/net").glob(f"{network.bridge_name(folder)}*")}


@pytest.fixture(params=NETWORKS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes with two GPUs; nothing of them may be left afterwards."""
    made = Cluster.up(tmp_path / "box", nodes=2, gpus=2, network=request.param, owner=os.getpid())
    try:
        assert len(interfaces_of(made.folder)) == (3 if request.param == NAMESPACES else 0)
        yield made
    finally:
        made.down()
    assert not processes_of(made.folder)
    assert not interfaces_of(made.folder)
    assert sorted(path.name for path in made.folder.iterdir()) == ["log"]
    made.down()  # safe to repeat


def test_jobs_arrays_and_gpus(cluster: Cluster, tmp_path: Path) -> None:
    seen = cluster.run(
        [
            "srun",
            "-N2",
            "--ntasks-per-node=2",
            "--gpus-per-task=1",
            "sh",
            "-c",
            "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES",
        ]
    ).stdout.splitlines()
    assert sorted(seen) == ["node1 0 0", "node1 1 1", "node2 0 0", "node2 1 1"]
    whole = cluster.run(["srun", "-n1", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES"]).stdout
    assert whole.strip() == "0,1"
    array = cluster.submit("echo $SLURM_ARRAY_TASK_ID", "--array=0-3", output=tmp_path / "task-%a")
    for task in range(4):
        assert cluster.wait(f"{array}_{task}") == "COMPLETED"
        assert (tmp_path / f"task-{task}").read_text().strip() == str(task)
    rejected = cluster.run(["sbatch", "--gres=gpu:3", "--wrap", "true"], check=False)
    assert rejected.returncode != 0


def test_node_dies_with_its_tasks_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    # The task has a child that leaves its process group: a power cut ends that, too.
    mark = tmp_path / "mark"
    script = f"srun sh -c 'setsid sleep 3611 & touch {mark}; wait'"
    job = cluster.submit(script, "-w", "node2", "--requeue")
    cluster.wait(job, "RUNNING")
    until(mark.exists)
    cluster.kill_node(2, mark_down=True)
    assert not cluster.is_running("node2")
    assert not [line for line in processes_of(tmp_path / "box") if "sleep 3611" in line]
    assert "down" in cluster.states()["node2"].state
    mark.unlink()
    cluster.start_node("node2")
    until(lambda: cluster.state(job) == "RUNNING" and cluster.restarts(job) == 1)
    until(mark.exists)
    cluster.clear()


@pytest.mark.parametrize("cluster", [BEST], indirect=True)
def test_jobs_survive_a_controller_restart_and_crash(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done")
    cluster.wait(job, "RUNNING")
    for kill in (False, True):
        # A graceful exit saves the state, so that the crash after it loses nothing.
        old = cluster.record.processes["slurmctld"]
        cluster.restart_controller(kill=kill)
        assert not old.alive()
        cluster.wait_ready()
        assert cluster.state(job) == "RUNNING"
    (tmp_path / "go").touch()
    assert cluster.wait(job) == "COMPLETED"


@pytest.mark.skipif(not ROOT, reason="namespaces need root")
def test_nodes_communicate_until_they_are_disconnected(tmp_path: Path) -> None:
    cluster = Cluster.up(tmp_path / "box", nodes=2, gpus=0, network=NAMESPACES)
    try:
        assert cluster.exec(1, ["hostname"]).stdout.strip() == "node1"
        reach = ["bash", "-c", f"exec 3<>/dev/tcp/node2/{cluster.record.ports['node2']}"]
        assert cluster.exec(1, reach, timeout=60).returncode == 0
        cluster.cut(2)
        assert cluster.states()["node2"].cut
        assert cluster.exec(1, ["timeout", "2", *reach]).returncode != 0
        cluster.heal(2)
        until(lambda: cluster.exec(1, reach, timeout=60).returncode == 0)
        cluster.wait_ready()
        # Nodes see only their own processes.
        assert len(cluster.exec(2, ["ps", "ax"]).stdout.splitlines()) < 12
    finally:
        cluster.down()


def test_two_sandboxes_at_once(tmp_path: Path) -> None:
    first = Cluster.up(tmp_path / "a", nodes=2, network=BEST)
    try:
        second = Cluster.up(tmp_path / "b", nodes=2, network=BEST)
        try:
            assert not set(first.record.ports.values()) & set(second.record.ports.values())
            for cluster in (first, second):
                assert len(cluster.run(["srun", "-N2", "hostname"]).stdout.split()) == 2
        finally:
            second.down()
        assert len(first.run(["srun", "-N2", "hostname"]).stdout.split()) == 2
        with pytest.raises(UsageError, match="already"):
            Sandbox.up(tmp_path / "a", network=BEST)
    finally:
        first.down()


def test_failed_start_leaves_nothing_and_reports_why(tmp_path: Path) -> None:
    box = tmp_path / "box"
    with pytest.raises(PacelineError, match="NoSuchKey"):
        Sandbox.up(box, nodes=2, network=BEST, options={"NoSuchKey": "1"})
    assert not processes_of(box)
    assert not interfaces_of(box)
    assert not (box / "sandbox.json").exists()
    with pytest.raises(UsageError, match="No sandbox is running"):
        Sandbox(box)


def test_orphaned_sandbox_is_recognised(tmp_path: Path) -> None:
    box = tmp_path / "box"
    owner = subprocess.Popen(["sleep", "3600"])
    try:
        sandbox = Sandbox.up(box, nodes=1, network=PLAIN, owner=owner.pid)
        assert not is_orphaned(box)
        owner.kill()
        owner.wait()
        assert is_orphaned(box)
        sandbox.down()
        assert not is_orphaned(box)
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
def test_ordinary_user(tmp_path: Path) -> None:
    # A temporary folder of its own: other users cannot enter those of the tests.
    box = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/paceline-nobody-XXXXXX"], text=True).strip()
    )
    os.chown(box, STRANGER, STRANGER)

    def use_a_sandbox() -> None:
        os.chdir(box)
        tempfile.tempdir = str(box)  # for locks, which would stay in /tmp
        with pytest.raises(UsageError, match="root"):
            Sandbox.up(box, network=NAMESPACES)
        sandbox = Sandbox.up(box, nodes=2, network=PLAIN)
        try:
            done = sandbox.run(
                [
                    "srun",
                    "-N2",
                    "--gpus-per-task=1",
                    "sh",
                    "-c",
                    "id -u; echo $CUDA_VISIBLE_DEVICES",
                ]
            )
            assert sorted(done.stdout.split()) == ["0", "0", str(STRANGER), str(STRANGER)]
        finally:
            sandbox.down()

    try:
        call_as(STRANGER, use_a_sandbox)
        assert not processes_of(box)
    finally:
        subprocess.run(["rm", "-r", str(box)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_accounting(tmp_path: Path, network: str) -> None:
    if missing := missing_packages(Settings(network=network, accounting=True)):
        pytest.skip(f"no accounting to test: install {' '.join(missing)}")
    cluster = Cluster.up(tmp_path / "box", nodes=1, network=network, accounting=True)
    try:
        job = cluster.submit("exit 3", "--job-name=three")
        assert cluster.wait(job) == "FAILED"
        command = ["sacct", "-nXP", "-j", job, "-o", "jobname,state,exitcode"]
        until(lambda: cluster.run(command).stdout.strip() == "three|FAILED|3:0")
    finally:
        cluster.down()
    assert not processes_of(tmp_path / "box")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"slurmd", "munged", "ip", "slurmdbd"}
    find = packages.find
    without = {"find": lambda name: None if name in absent else find(name)}
    assert missing_packages(Settings(), **without) == ["munge", "slurmd"]
    assert missing_packages(Settings(network=NAMESPACES), **without) == [
        "iproute2",
        "munge",
        "slurmd",
    ]
    assert "slurmdbd" in missing_packages(Settings(accounting=True), **without)
    monkeypatch.setattr(packages, "missing_packages", lambda _: ["munge", "slurmd"])
    with pytest.raises(EnvironmentProblem, match="munge slurmd"):
        packages.require(Settings())


def test_install_installs_exactly_the_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    apt = tmp_path / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$@" >>{calls}\n[ "$1" != install ] || [ ! -e {tmp_path}/broken ]\n'
    )
    apt.chmod(0o755)
    monkeypatch.setattr(packages, "missing_packages", lambda _: ["munge", "slurmd"])
    monkeypatch.setattr(packages, "find", lambda name: str(apt) if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert packages.install(Settings()) == ["munge", "slurmd"]
    assert calls.read_text().splitlines() == [
        "update -q",
        "install -y -q --no-install-recommends munge slurmd",
    ]
    (tmp_path / "broken").touch()
    with pytest.raises(EnvironmentProblem, match="apt-get install failed"):
        packages.install(Settings())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentProblem, match="munge slurmd"):
        packages.install(Settings())


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"gpus": -1}, "--gpus"),
        ({"network": "token-ring"}, "--network"),
        ({"options": {"Slurm Port": "1"}}, "--slurm-option"),
    ],
)
def test_invalid_settings(settings: dict[str, object], flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=flag):
        Sandbox.up(tmp_path, **settings)  # type: ignore[arg-type]


def test_a_folder_that_slurm_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot contain"):
        Sandbox.up(tmp_path / "a b", network=PLAIN)
