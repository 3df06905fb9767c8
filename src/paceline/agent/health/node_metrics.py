"""The sampler of an agent: a thread that records what its node uses in `system/node-K.jsonl`: CPU,
memory and GPUs, from /proc, /sys and the GPU driver.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent.health.cgroup import cpu_quota, memory_limit, out_of_memory_kills
from paceline.agent.health.heartbeat import Heartbeat, Heartbeats
from paceline.agent.launcher_placement import Placement
from paceline.agent.workers import process_tree
from paceline.contract.foreign_records import LineWriter
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.agent.health.nvml import Gpus

# seconds; it doubles up to the configured one, so that short runs leave samples too
FIRST_INTERVAL = 1.0
CLOSE_TIMEOUT = 2.0  # seconds; a driver that hangs must not hold the agent


class NodeMetrics:
    """Reads the counters; shares cover the time since the last sample. `roots` returns processes of
    the run.
    """

    def __init__(
        self,
        roots: Callable[[], Collection[int]],
        *,
        gpus: Gpus | None = None,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._proc, self._sys, self._gpus = proc, sys, gpus
        self._roots = roots
        self._own: dict[int, int] = {}  # CPU ticks so far of each process of the run
        self._tick = os.sysconf("SC_CLK_TCK")
        self._last: dict[str, float] = {}
        self._last_time = 0.0
        self.sample()

    def facts(self) -> dict[str, Any]:
        """Return what does not change during the run."""
        found: dict[str, Any] = {
            "cores": os.cpu_count() or 1,
            "own_cores": len(os.sched_getaffinity(0)),
            "memory_total": read_memory(self._proc)[0],
        }
        limit = memory_limit(self._proc, self._sys)
        if limit is not None:
            found["memory_limit"] = limit
        if self._gpus is not None:
            found["gpus"] = self._gpus.models
        return found

    def sample(self) -> dict[str, Any]:
        """Return the usage since the last call."""
        now = time.monotonic()
        seconds = now - self._last_time
        busy, idle = self._cpu()
        own_cpu, own_memory = self._own_usage()
        total, free = read_memory(self._proc)
        periods, throttled = cpu_quota(self._proc, self._sys)
        counters = {"busy": busy, "idle": idle, "periods": periods, "throttled": throttled}
        last, self._last, self._last_time = self._last, counters, now
        if not last or seconds <= 0:
            return {}
        step = {name: max(0.0, value - last.get(name, value)) for name, value in counters.items()}
        share = step["busy"] / max(1.0, step["busy"] + step["idle"])
        found: dict[str, Any] = {
            "cpu": round(100 * share, 1),
            "own_cpu": round(own_cpu / self._tick / seconds, 2),
            "memory": total - free,
            "own_memory": own_memory,
        }
        if step["periods"]:
            found["throttled"] = round(100 * step["throttled"] / step["periods"], 1)
        if kills := out_of_memory_kills(self._proc, self._sys):
            found["oom_kills"] = kills
        if self._gpus is not None:
            found["gpus"] = self._gpus.sample()
        return found

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()

    # -- the files
    # ---------------------------------------------------------------------------------------

    def _own_usage(self) -> tuple[int, int]:
        """Return what the processes of the run have used: CPU ticks since the last call, and bytes
        of memory. Shared memory counts for each process.
        """
        stats = process_tree.read_stats(self._proc)
        roots = set(self._roots()) & stats.keys()
        own = roots.union(*(process_tree.descendants(root, stats) for root in roots))
        before, self._own = self._own, {pid: sum(map(int, stats[pid][11:13])) for pid in own}
        ticks = sum(max(0, used - before.get(pid, used)) for pid, used in self._own.items())
        pages = sum(int(stats[pid][21]) for pid in own)
        return ticks, pages * os.sysconf("SC_PAGE_SIZE")

    def _cpu(self) -> tuple[float, float]:
        """Return busy and idle ticks of all cores together. The time of guests is already part of
        the host's.
        """
        with open(self._proc / "stat", "rb") as file:
            numbers = [int(field) for field in file.readline().split()[1:9]]
        idle = numbers[3] + numbers[4]
        return sum(numbers) - idle, idle


def read_memory(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return the bytes of this node's memory, and how many of them are available, by the kernel's
    own estimate.
    """
    text = (proc / "meminfo").read_text(encoding="ascii", errors="replace")
    found = {name: int(number) for name, number in re.findall(r"^(\w+):\s*(\d+) kB", text, re.M)}
    return found["MemTotal"] << 10, found["MemAvailable"] << 10


class Sampler:
    """Appends one line per sample, or at least renews the file's date: `paceline ps` takes that as
    a sign of life.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval: float,
        roots: Callable[[], Collection[int]],
        header: Mapping[str, Any],
        ranks: Callable[[], list[list[Any]]] = list,
        gpu_environ: Mapping[str, str] | None,
        warn: Callable[[str], None],
    ) -> None:
        """`header` goes into the first line, and `ranks` into each of the others.

        `gpu_environ` says which GPUs are visible; None samples no GPU.
        """
        self._path, self._interval, self._roots, self._header = path, interval, roots, dict(header)
        self._ranks, self._gpu_environ, self._warn = ranks, gpu_environ, warn
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        pause = min(FIRST_INTERVAL, self._interval)
        # The ranks start meanwhile, so wait before importing what is needed here.
        if self._closed.wait(pause):
            return
        try:
            self._sample(pause)
        except OSError as problem:
            self._warn(
                f"system metrics stop here ({problem.filename or self._path}: {problem.strerror})"
            )

    def _sample(self, pause: float) -> None:
        from paceline.agent.health.nvml import Gpus

        gpus = Gpus.open(self._gpu_environ) if self._gpu_environ is not None else None
        metrics = NodeMetrics(self._roots, gpus=gpus)
        lines = LineWriter(self._path)
        header = {**self._header, "interval": self._interval, **metrics.facts()}
        try:
            has_header = lines.append(_line(header))
            while not self._closed.wait(pause):
                has_header = has_header or lines.append(_line(header))
                if not lines.append(self._line_of_sample(metrics)):
                    with suppress(OSError):  # a full disk still takes a date
                        os.utime(self._path)
                pause = min(2 * pause, self._interval)
        finally:
            lines.close()
            metrics.close()

    def _line_of_sample(self, metrics: NodeMetrics) -> str:
        try:
            return _line({**metrics.sample(), "ranks": self._ranks()})
        # this node is short of descriptors or memory: the next sample may work
        except OSError as problem:
            return _line({"error": f"{problem.filename or 'sample'}: {problem.strerror}"})


def start_sampler(
    run: RunFolder,
    launch_spec: LaunchSpec,
    placement: Placement,
    heartbeats: Heartbeats,
    *,
    environ: Mapping[str, str],
    job_start: str,
    warn: Callable[[str], None],
) -> Sampler | None:
    """Start sampling if the run asks for it; one agent of each node does it."""
    if not launch_spec.system_metrics or sys.platform != "linux" or placement.local_ranks[0] != 0:
        return None
    gpu_environ = {**environ, **launch_spec.variables}
    # this agent sees one of the node's GPUs, but reports on all of them
    if launch_spec.one_gpu_per_rank:
        gpu_environ.pop(VISIBLE_DEVICES, None)

    def roots() -> set[int]:
        """Return this agent and its ranks; if each rank has its own agent, the process that
        started them all.
        """
        parent = os.getppid()
        if placement.count > placement.nodes and parent > 1:
            return {parent}
        return {
            os.getpid(),
            *(heartbeats.read(local_rank).pid for local_rank in placement.local_ranks),
        } - {0}

    def ranks() -> list[list[Any]]:
        numbers = zip(placement.ranks, placement.local_ranks, strict=True)
        return [rank_row(rank, heartbeats.read(local)) for rank, local in numbers]

    return Sampler(
        run.node_metrics(placement.node),
        interval=launch_spec.system_metrics,
        roots=roots,
        header={"host": placement.host, "job_start": job_start},
        ranks=ranks,
        gpu_environ=gpu_environ if launch_spec.gpus else None,
        warn=warn,
    )


def rank_row(rank: int, heartbeat: Heartbeat) -> list[Any]:
    """Return a rank's number, state, step, seconds since its heartbeat, process state, and how it
    spends its time.
    """
    age = round(max(0.0, time.time() - heartbeat.time), 1) if heartbeat.time else None
    process = process_tree.state(heartbeat.pid) if heartbeat.pid else ""
    times = (heartbeat.seconds_per_step, heartbeat.seconds_waited, heartbeat.own_seconds)
    seconds = [round(each, 6) for each in times]
    return [rank, heartbeat.state, heartbeat.step, age, process, *seconds]


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({"time": round(time.time(), 3), **values}, ensure_ascii=False) + "\n"
