"""`paceline doctor RUN` on a real cluster: each planted fault is named, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.contract.run_folder import RunFolder
from paceline.tools.sandbox import NAMESPACES
from tests.slurm.harness import ENDED, Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of
from tests.until import until

pytestmark = pytest.mark.timeout(600)
SHAPE = (
    "--nodes",
    "2",
    "--nproc",
    "1",
    "--cpus-per-gpu",
    "1",
    "--time",
    "10m",
    "--no-snapshot",
    "--no-requeue",
    "--max-attempts",
    "1",
    "--system-metrics",
    "1s",
)

SLEEPS = """\
import os, time
import torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(600)
dist.init_process_group("gloo")
"""

TRAINS = """\
import os, sys, time, torch, paceline

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep({pause})
        return torch.ones(64)

with paceline.session(seed=0) as run:
    model = run.wrap(torch.nn.Linear(64, 64))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in run.steps(run.loader(Data(), batch_size=8)):
        for _ in range({work}):
            y = model.module(x) if hasattr(model, "module") else model(x)
        run.backward(model(x).square().mean())
        run.update(opt)
"""

WAITS = "import time; time.sleep(600)"
FULL = 'import os\nwith open("/dev/full", "w", buffering=1) as file:\n    print("x" * 100, file=file)\n'

# A driver's library that has lost a GPU on one node.
DRIVER = r"""
#include <string.h>
#include <unistd.h>
static int gpus(void) {{ char name[64]; gethostname(name, sizeof name); return strcmp(name, "{host}") ? 2 : 1; }}
int nvmlInit_v2(void) {{ return 0; }}
int nvmlShutdown(void) {{ return 0; }}
int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = gpus(); return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {{
    *handle = (void *)(long)(index + 1); return index < (unsigned)gpus() ? 0 : 2;
}}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {{ return 2; }}
int nvmlDeviceGetUtilizationRates(void *handle, void *rates) {{ return 3; }}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {{ memory[0] = 80ULL << 30; return 0; }}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *power) {{ return 3; }}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {{ return 3; }}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) {{ strcpy(name, "A100"); return 0; }}
"""


class Patient:
    """A run with a fault, and what the doctor says about it."""

    def __init__(self, home: Path, cluster: Cluster, paceline: Paceline) -> None:
        self.home, self.cluster, self.paceline = home, cluster, paceline
        self.folder, self.job = RunFolder(home), ""

    def submit(self, script: str, *options: str) -> None:
        project(self.home, script)
        done = self.paceline("submit", *SHAPE, *options, "train.py", cwd=self.home, timeout=200)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.folder = run_of(done)
        self.job = self.folder.job.read_text().strip()

    def until(self, holds: Callable[[], object], what: str) -> None:
        until(holds, what, details=lambda: diagnostics(self.folder), within=240, pause=0.5)

    def ends(self) -> None:
        self.until(lambda: self.cluster.state(self.job) in ENDED, "it does not end")

    def samples(self, node: int) -> list[dict[str, Any]]:
        path = self.folder.node_metrics(node)
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")][1:]

    def trains(self, seconds: float) -> None:
        """Wait until samples show that all ranks have made steps for this long."""

        def spans() -> list[float]:
            found = []
            for node in (0, 1):
                times = [
                    each["time"]
                    for each in self.samples(node)
                    if each["ranks"] and each["ranks"][0][2] > 0
                ]
                found.append(times[-1] - times[0] if times else 0.0)
            return found

        self.until(lambda: min(spans()) >= seconds, "it does not train")

    def problems(self) -> list[dict[str, Any]]:
        done = self.paceline("doctor", "--json", str(self.folder.path), timeout=200)
        findings = json.loads(done.stdout)["findings"]
        bad = [each for each in findings if each["level"] in ("warning", "problem")]
        assert done.returncode == (1 if any(each["level"] == "problem" for each in bad) else 0), (
            done.stderr
        )
        return bad


@pytest.fixture
def patient(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> Patient:
    return Patient(tmp_path / "project", cluster, slurm_paceline)


@pytest.mark.slow
def test_one_node_asleep_before_init(patient: Patient) -> None:
    patient.submit(SLEEPS, "--cpu")
    found: list[dict[str, Any]] = []
    patient.until(lambda: found.extend(patient.problems()) or found, "the doctor finds nothing")
    (hang,) = found
    assert hang["about"] == "hang"
    assert hang["text"].startswith("Rank 1 on ")
    evidence = "\n".join(hang["evidence"])
    assert "train.py:4" in evidence, "the line that sleeps"
    assert "1 other rank waits in" in evidence


@pytest.mark.slow
def test_nothing_wrong(patient: Patient) -> None:
    patient.submit(TRAINS.format(pause=0, work=50), "--cpu")
    patient.trains(6)
    assert patient.problems() == []


@pytest.mark.slow
def test_a_full_disk(patient: Patient) -> None:
    patient.submit(FULL, "--cpu")
    patient.ends()
    (disk,) = patient.problems()
    assert disk["about"] == "disk"
    assert "No space left on device" in disk["evidence"][0]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_short_of_gpus(patient: Patient, tmp_path: Path) -> None:
    if patient.cluster.record.settings.network != NAMESPACES:
        pytest.skip("all nodes have the same name")
    node = patient.cluster.nodes[1]
    (tmp_path / "driver.c").write_text(DRIVER.format(host=node))
    library = tmp_path / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "driver.c")], check=True
    )
    patient.submit(
        WAITS,
        "--gpus",
        "2",
        "--nproc",
        "2",
        "--env",
        f"LD_LIBRARY_PATH={library.parent}",
        "--nodelist",
        f"{patient.cluster.nodes[0]},{node}",
    )
    patient.until(lambda: len(patient.samples(0)) > 1 and len(patient.samples(1)) > 1, "no samples")
    (short,) = patient.problems()
    assert short["about"] == "GPUs"
    assert short["evidence"] == [f"{node}: the driver (NVML) shows 1 of the 2 GPUs requested"]


@pytest.mark.slow
def test_the_wrong_interface(patient: Patient) -> None:
    patient.submit(
        TRAINS.format(pause=0, work=1),
        "--cpu",
        "--env",
        "GLOO_SOCKET_IFNAME=lo",
        "--timeout",
        "20s",
    )
    patient.ends()
    (wrong,) = patient.problems()
    assert wrong["about"] == "interface"
    assert "GLOO_SOCKET_IFNAME is lo" in wrong["text"]
    *nodes, error = wrong["evidence"]
    assert [each.rpartition(" is ")[2] for each in nodes] == ["eth0", "eth0"], wrong["evidence"]
    assert "gloo" in error.lower()


@pytest.mark.slow
def test_a_cut_cable(patient: Patient) -> None:
    patient.submit(WAITS, "--cpu")
    patient.until(
        lambda: any(each["ranks"][0][1] for each in patient.samples(1)), "no rank has started"
    )
    hosts = [
        json.loads(patient.folder.node_metrics(node).read_text().splitlines()[0])["host"]
        for node in (0, 1)
    ]
    patient.cluster.cut(hosts[1])
    try:
        patient.until(patient.folder.attempt(1).verdict.exists, "nobody misses the node")
    finally:
        patient.cluster.heal(hosts[1])
    (cut,) = patient.problems()
    assert cut["about"] == "network"
    assert f"The network connection to {hosts[1]} was lost" in cut["text"]
    assert any(hosts[0] in each for each in cut["evidence"])


@pytest.mark.slow
def test_a_slow_loader(patient: Patient) -> None:
    patient.submit(TRAINS.format(pause=0.05, work=1), "--cpu")
    patient.trains(8)
    (slow,) = patient.problems()
    assert slow["about"] == "data"
    assert slow["text"].startswith("The data loader is slow:")


@pytest.fixture
def throttle() -> Iterator[Callable[[list[int], float], None]]:
    """`throttle(pids, share)`: let processes have a share of a core."""
    group = Path("/sys/fs/cgroup/cpu", f"paceline-doctor-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as problem:
        pytest.skip(f"cannot limit CPU time here: {problem}")

    def move(pids: list[int], share: float) -> None:
        (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * share)))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))

    yield move
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


def processes_of(cluster: Cluster, node: str) -> list[int]:
    """Return the processes in a node's namespace."""
    inside = os.readlink(f"/proc/{cluster._init(node).pid}/ns/pid")
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/pid") == inside:
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_throttled_core(patient: Patient, throttle: Callable[[list[int], float], None]) -> None:
    patient.submit(TRAINS.format(pause=0, work=200), "--cpu")
    patient.trains(1)
    host = json.loads(patient.folder.node_metrics(1).read_text().splitlines()[0])["host"]
    throttle(processes_of(patient.cluster, host), 0.05)
    patient.until(
        lambda: sum("throttled" in each for each in patient.samples(1)) > 8, "it is not throttled"
    )
    (slow,) = patient.problems()
    assert slow["about"] == "throttled"
    assert f"The cores of {host} are throttled" in slow["text"]


@pytest.mark.slow
def test_fitness_goes_on_without_a_slow_node(
    patient: Patient, throttle: Callable[[list[int], float], None]
) -> None:
    patient.submit("print('trains')", "--cpu", "--requeue", "--fitness")
    arrived = patient.folder.events / "agent-1.jsonl"
    patient.until(
        lambda: arrived.exists() and arrived.read_text().endswith("\n"), "no agent has arrived"
    )
    slow = json.loads(arrived.read_text().splitlines()[0])["host"]
    throttle(processes_of(patient.cluster, slow), 0.02)
    start = patient.folder.job_start(f"{patient.job}-0")
    patient.until(start.excluded_nodes.exists, "no node is excluded")
    assert start.excluded_nodes.read_text().split() == [slow]
    (found,) = [each for each in patient.problems() if each["about"] == "slow node"]
    assert f"{slow}: a limit of CPU time" in found["text"]
    patient.until(
        lambda: patient.cluster.restarts(patient.job) > 0, "it does not go back into the queue"
    )
    assert slow in patient.cluster.show(patient.job)["ExcNodeList"]


@pytest.mark.slow
def test_inside_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "paceline", "doctor", "--json", "--scratch", str(tmp_path)]
    done = cluster.run(
        ["salloc", "--nodes=2", "--cpus-per-task=1", "--time=5", "--quiet", *doctor], timeout=200
    )
    found = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    assert [each["about"] for each in found.values() if each["level"] == "problem"] == []
    hosts = cluster.nodes[:2]
    assert all(f"{host}: eth0" in found["nodes"]["text"] for host in hosts)
    assert "on 2 nodes" in found["versions"]["text"]
    assert "2 x cpu" in found["fitness"]["text"]
    assert "exchanges between two nodes" in found["fitness"]["text"]
