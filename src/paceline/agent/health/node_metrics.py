"""A node's CPU, memory, network, disk and GPU usage, from /proc, /sys and the GPU driver.

A sample reads a handful of files, plus one for each process of the run. Processes of other users
are not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from paceline.agent.health.cgroup import cpu_quota, memory_limit, out_of_memory_kills
from paceline.agent.health.nvml import Gpus

# samples after which the pid of a foreign process may have become one of the run
RECHECK_AFTER = 20
SECTOR = 512  # bytes in /proc/diskstats, whatever the disk uses
IB_WORD = 4  # bytes; InfiniBand ports count words of four
_SHARES = ("busy", "idle", "periods", "throttled")  # counters that become shares, not rates


class NodeMetrics:
    """Reads the counters; rates cover the time since the last sample. `roots` returns processes of
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
        self._processes = RunProcesses(roots, proc)
        self._disks = [path.name for path in sys.glob("block/*") if (path / "device").exists()]
        self._cards = [path.parent.name for path in sys.glob("class/net/*/device")]
        self._ports = sorted(sys.glob("class/infiniband/*/ports/*/counters"))
        self._tick = os.sysconf("SC_CLK_TCK")
        self._last: dict[str, float] = {}
        self._last_time = 0.0
        self.sample()

    def facts(self) -> dict[str, Any]:
        """Return what does not change during the run."""
        found: dict[str, Any] = {
            "cores": os.cpu_count() or 1,
            "own_cores": len(os.sched_getaffinity(0)),
            "memory_total": self._memory()[0],
        }
        limit = memory_limit(self._proc, self._sys)
        if limit is not None:
            found["memory_limit"] = limit
        if self._gpus is not None:
            found["gpus"] = [
                {"name": name, "memory": memory}
                for name, memory in zip(self._gpus.names, self._gpus.memory, strict=True)
            ]
        return found

    def sample(self) -> dict[str, Any]:
        """Return the usage since the last call."""
        now = time.monotonic()
        seconds = now - self._last_time
        busy, idle = self._cpu()
        own_cpu, own_memory = self._processes.sample()
        total, free = self._memory()
        quota = cpu_quota(self._proc, self._sys)
        counters = {
            "busy": busy,
            "idle": idle,
            "periods": quota.periods,
            "throttled": quota.throttled,
            **self._network(),
            **self._fabric(),
            **self._disk_io(),
        }
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
            **{name: round(value / seconds) for name, value in step.items() if name not in _SHARES},
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

    def _cpu(self) -> tuple[float, float]:
        """Return busy and idle ticks of all cores together. The time of guests is already part of
        the host's.
        """
        with open(self._proc / "stat", "rb") as file:
            numbers = [int(field) for field in file.readline().split()[1:9]]
        idle = numbers[3] + numbers[4]
        return sum(numbers) - idle, idle

    def _memory(self) -> tuple[int, int]:
        """Return the bytes of memory, and how many of them are available."""
        found = {}
        with open(self._proc / "meminfo", "rb") as file:
            for line in file:
                name, _, rest = line.partition(b":")
                if name in (b"MemTotal", b"MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024
                    if len(found) == 2:
                        break
        total = found.get(b"MemTotal", 0)
        return total, found.get(b"MemAvailable", total)

    def _network(self) -> dict[str, float]:
        """Return bytes through the network cards; without any (a container), through all
        interfaces but loopback.
        """
        read = {}
        with open(self._proc / "net" / "dev", encoding="ascii", errors="replace") as file:
            for line in file.readlines()[2:]:
                name, _, rest = line.partition(":")
                numbers = rest.split()
                read[name.strip()] = (int(numbers[0]), int(numbers[8]))
        read.pop("lo", None)
        cards = [name for name in self._cards if name in read] or list(read)
        return {
            "net_in": sum(read[name][0] for name in cards),
            "net_out": sum(read[name][1] for name in cards),
        }

    def _fabric(self) -> dict[str, float]:
        """Return bytes through InfiniBand and RoCE ports, which the interface counters do not
        include.
        """
        if not self._ports:
            return {}
        return {
            "fabric_in": sum(IB_WORD * _number(port / "port_rcv_data") for port in self._ports),
            "fabric_out": sum(IB_WORD * _number(port / "port_xmit_data") for port in self._ports),
        }

    def _disk_io(self) -> dict[str, float]:
        read = written = 0
        with open(self._proc / "diskstats", encoding="ascii", errors="replace") as file:
            for line in file:
                fields = line.split()
                if fields[2] in self._disks:
                    read += int(fields[5]) * SECTOR
                    written += int(fields[9]) * SECTOR
        return {"disk_in": read, "disk_out": written}


class RunProcesses:
    """The processes of the run on this node: its roots and all their descendants."""

    def __init__(self, roots: Callable[[], Collection[int]], proc: Path = Path("/proc")) -> None:
        self._roots, self._proc = roots, str(proc)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._known_roots: set[int] = set()
        self._own: dict[int, int] = {}  # pid -> CPU ticks so far; -1: not read yet
        self._foreign: set[int] = set()
        self._updates = 0

    def sample(self) -> tuple[int, int]:
        """Return CPU ticks since the last call, and bytes of memory. Shared memory counts for each
        process.
        """
        self._update()
        ticks = memory = 0
        for pid, before in list(self._own.items()):
            found = self._read(pid)
            if found is None:
                del self._own[pid]
                continue
            _, used, pages = found
            ticks += max(0, used - before) if before >= 0 else 0
            memory += pages * self._page
            self._own[pid] = used
        return ticks, memory

    def _update(self) -> None:
        """Find new processes of the run. A foreign process stays foreign, so only new ones are
        read.
        """
        roots = set(self._roots())
        self._updates += 1
        if not roots <= self._known_roots or self._updates % RECHECK_AFTER == 0:
            self._foreign.clear()
        self._known_roots = roots
        running = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._foreign &= running
        for pid in roots & running:
            self._own.setdefault(pid, -1)
        parents: dict[int, int] = {}
        for pid in running - self._foreign - self._own.keys():
            found = self._read(pid)
            if found is not None:
                parents[pid] = found[0]
        while children := [pid for pid, parent in parents.items() if parent in self._own]:
            for pid in children:
                self._own[pid] = -1
                del parents[pid]
        self._foreign |= parents.keys()

    def _read(self, pid: int) -> tuple[int, int, int] | None:
        """Return parent, CPU ticks and pages of memory of a process; None once it is gone."""
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:
                # The command name, in parentheses, may contain anything: parse what follows the
                # last one.
                fields = file.read().rpartition(b")")[2].split()
            return int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[21])
        except (OSError, IndexError, ValueError):
            return None


def _number(path: Path) -> int:
    """Return the number in a file, or 0 if there is none."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return 0
