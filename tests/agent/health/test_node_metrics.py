"""Node metrics: the right numbers from the right files, and never a failed run because of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.health import node_metrics
from paceline.agent.health.node_metrics import NodeMetrics, Sampler
from paceline.agent.health.nvml import Gpus
from paceline.contract.run_folder import RunFolder
from paceline.watch.node_usage import read_node_usage
from tests.agent.conftest import Launch, until
from tests.small_disk import fill, mount_small_disk


class Machine:
    """Folders that look like /proc and /sys."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.proc.mkdir()
        (self.proc / "meminfo").write_text(
            "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"
        )
        self.set(busy=100, idle=100)

    def set(self, *, busy: int, idle: int) -> None:
        # user nice system idle iowait irq softirq steal, then what is counted in user already
        (self.proc / "stat").write_text(
            f"cpu  {busy} 0 0 {idle} 0 0 0 0 {busy} 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
        )


def test_shares_are_those_between_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    now = [50.0]
    with monkeypatch.context() as patch:
        patch.setattr(node_metrics.time, "monotonic", lambda: now[0])
        metrics = NodeMetrics(lambda: (), proc=machine.proc, sys=machine.sys)
        machine.set(busy=175, idle=125)
        now[0] += 2.0
        found = metrics.sample()
    assert found == {"cpu": 75.0, "own_cpu": 0.0, "memory": 600 * 1024, "own_memory": 0}
    assert metrics.facts()["memory_total"] == 1000 * 1024


def test_throttled_periods_are_a_share(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.proc / "self").mkdir()
    (machine.proc / "self/cgroup").write_text("0::/job\n")
    stat = machine.sys / "fs/cgroup/job/cpu.stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("nr_periods 100\nnr_throttled 100\n")
    metrics = NodeMetrics(lambda: (), proc=machine.proc, sys=machine.sys)
    assert "throttled" not in metrics.sample(), "no period since"
    stat.write_text("nr_periods 140\nnr_throttled 130\n")
    assert metrics.sample()["throttled"] == 75.0


def test_this_machine() -> None:
    metrics = NodeMetrics(lambda: {os.getpid()})
    sum(range(10**6))
    found, facts = metrics.sample(), metrics.facts()
    assert 0 <= found["cpu"] <= 100
    assert 2**20 < found["own_memory"] < facts["memory_total"]
    assert 2**20 < found["memory"] <= facts["memory_total"]
    assert facts["own_cores"] <= facts["cores"]


# -- GPUs ------------------------------------------------------------------------------------------------

# A driver's library with three GPUs, the last of which reports as little as a MIG slice does.
DRIVER = r"""
#include <string.h>
typedef struct { unsigned int gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
static char gpus[3];
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **gpu) { if (i > 2) return 2; *gpu = gpus + i; return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, void **gpu) {
    if (strcmp(id, "GPU-two")) return 2;
    *gpu = gpus + 1;
    return 0;
}
static int number(void *gpu) { return (char *)gpu - gpus; }
int nvmlDeviceGetName(void *gpu, char *name, unsigned int size) {
    strncpy(name, "Test GPU", size); name[7] = '0' + number(gpu); return 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, Rates *found) {
    if (number(gpu) == 2) return 3;
    found->gpu = 90 + number(gpu); found->memory = 5; return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *found) {
    found->total = 80ULL << 30; found->used = (10ULL + number(gpu)) << 30; found->free = found->total - found->used;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned int *watts) { *watts = 312345; return number(gpu) == 2 ? 3 : 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned int *heat) { *heat = 60; return sensor; }
#ifdef HEALTH
typedef struct { void *gpu; unsigned long long type, data; unsigned int one, two; } Event;
static int pending = 1;
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, unsigned long long *count) {
    *count = number(gpu) == 1 && type == 1 && counter == 0 ? 4 : 0; return number(gpu) == 2 ? 3 : 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
    *bits = number(gpu) == 0 ? 0x64 : 0x05; return 0;
}
int nvmlEventSetCreate(void **set) { *set = gpus; return 0; }
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(void *gpu, unsigned long long types, void *set) { return types == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned int timeout) {
    event->gpu = gpus + 1; event->type = 8; event->data = 79; return pending-- > 0 ? 0 : 10;
}
#endif
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build a fake driver")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    # an old one, and a new one
    for name, options in (("driver.so", []), ("health.so", ["-DHEALTH"])):
        source = str(folder / "driver.c")
        subprocess.run(
            [compiler, *options, "-shared", "-fPIC", "-o", str(folder / name), source], check=True
        )
    return str(folder / "driver.so")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Test GP0", "Test GP1", "Test GP2"]),
        ("1", ["Test GP1"]),
        ("2,0", ["Test GP2", "Test GP0"]),
        ("GPU-two, 0", ["Test GP1", "Test GP0"]),
        ("7,1", ["Test GP1"]),
        ("", None),
        ("-1", None),
        ("GPU-x", None),
    ],
)
def test_only_visible_gpus_are_read(
    driver: str, visible: str | None, names: list[str] | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = Gpus.open(environ, library=driver)
    assert ([each["name"] for each in found.models] if found else None) == names


def test_a_gpu_reports_what_it_supports(driver: str) -> None:
    gpus = Gpus.open({"CUDA_VISIBLE_DEVICES": "1,2"}, library=driver)
    assert gpus is not None
    assert gpus.sample() == [
        {"busy": 91, "memory": 11 << 30, "power": 312.3, "temperature": 60},
        {"memory": 12 << 30, "temperature": 60},
    ]
    metrics = NodeMetrics(lambda: (), gpus=gpus)
    assert metrics.facts()["gpus"] == [
        {"name": "Test GP1", "memory": 80 << 30},
        {"name": "Test GP2", "memory": 80 << 30},
    ]
    assert len(metrics.sample()["gpus"]) == 2
    metrics.close()


def test_errors_and_slowdowns(driver: str) -> None:
    gpus = Gpus.open({}, library=driver.replace("driver.so", "health.so"))
    assert gpus is not None
    names = ("ecc", "slowdown", "xid")
    for _ in range(2):  # an error stays known
        found = [{name: each[name] for name in names if name in each} for each in gpus.sample()]
        assert found == [{"slowdown": "heat"}, {"ecc": 4, "xid": 79}, {}]
    gpus.close()


def test_no_driver_is_no_problem(tmp_path: Path) -> None:
    assert Gpus.open({}, library="libnot-there.so") is None
    assert Gpus.open({}, library="libc.so.6") is None, (
        "a library of that name with other things in it"
    )


# -- the agent -------------------------------------------------------------------------------------------

# Ends after two samples, once one of them includes what all ranks hold, or at the timeout.
WAITING = """\
import os, pathlib, re, time
held = bytearray(40_000_000)
path = pathlib.Path(os.environ["PACELINE_RUN"], "system", "node-0.jsonl")
deadline = time.monotonic() + {timeout}
memory, expected = [], 40_000_000 * int(os.environ.get("WORLD_SIZE", 1))
while time.monotonic() < deadline and (len(memory) < 2 or max(memory) < expected):
    time.sleep(0.1)
    memory = [int(size) for size in re.findall('"own_memory": ([0-9]+)', path.read_text() if path.is_file() else "")]
"""


def lines_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.node_metrics(0).read_text().splitlines()]


def test_an_agent_records_its_node(launch: Launch) -> None:
    done = launch(WAITING.format(timeout=60), system_metrics=0.5)
    assert done.wait() == 0, done.err()
    first, *samples = lines_of(done.run)
    assert {
        "time",
        "host",
        "job_start",
        "interval",
        "cores",
        "own_cores",
        "memory_total",
    } <= first.keys()
    assert (first["job_start"], first["interval"]) == ("here", 0.5)
    assert len(samples) >= 2
    # The last sample may miss ranks that have ended already.
    assert max(sample["own_memory"] for sample in samples) > 80_000_000, (
        "two ranks, and what each of them holds"
    )
    assert "gpus" not in first, "the run requested none"
    (use,) = read_node_usage(done.run)
    assert (use.node, use.host) == (0, first["host"])
    assert use.peak("own_memory") == max(sample["own_memory"] for sample in samples)
    assert 0 <= use.mean("cpu") <= 100


def test_sampling_goes_on_once_the_folder_can_be_written(launch: Launch, tmp_path: Path) -> None:
    """Without samples, `paceline ps` would take the run for dead."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/system").write_text("in the way")
    started = launch(WAITING.format(timeout=60), system_metrics=0.5)
    until(lambda: "some lines are lost" in started.err(), "it has not tried to write")
    (tmp_path / "run/system").unlink()
    assert started.wait() == 0, started.err()
    first, *samples = lines_of(started.run)
    assert first["interval"] == 0.5, "the header comes first"
    assert len(samples) >= 2


def test_samples_on_a_full_disk_renew_the_date_of_the_file(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "small", "64k") as disk:
        path = disk / "node-0.jsonl"
        sampler = Sampler(
            path, interval=0.1, roots=lambda: {os.getpid()}, header={}, gpu_environ=None, warn=print
        )
        try:
            until(lambda: path.exists() and path.stat().st_size, "nothing is sampled")
            fill(disk)
            size = 0
            while size != path.stat().st_size:  # the last page of the file has space left
                size = path.stat().st_size
                time.sleep(1)
            os.utime(path, (0, 0))
            until(lambda: path.stat().st_mtime > 0, "the file keeps its date")
            assert path.stat().st_size == size
        finally:
            sampler.close()
