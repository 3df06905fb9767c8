"""What a node does while ranks run on it: CPU, memory, network, disks and GPUs, from /proc, /sys and the GPU's driver.

A sample reads a handful of files, and one more for each process of the run; what only others do is left alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from paceline.agent.health.nvml import Gpus

FORGET_AFTER = 20  # samples after which a number that was a stranger's may be one of ours
SECTOR = 512  # bytes, whatever the disk's own are
IB_WORD = 4  # the fabric counts words
_UNLIMITED = 1 << 60  # what a memory limit of version 1 says when there is none


class Sampler:
    """Reads the counters; rates are over the time since the last sample. `roots` names processes of the run."""

    def __init__(
        self,
        roots: Callable[[], Collection[int]],
        *,
        gpus: Gpus | None = None,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._proc, self._sys, self._gpus = proc, sys, gpus
        self._own = OwnProcesses(roots, proc)
        self._disks = [path.name for path in sys.glob("block/*") if (path / "device").exists()]
        self._cards = [path.parent.name for path in sys.glob("class/net/*/device")]
        self._ports = sorted(sys.glob("class/infiniband/*/ports/*/counters"))
        self._tick = os.sysconf("SC_CLK_TCK")
        self._last: dict[str, float] = {}
        self._last_time = 0.0
        self.sample()

    def facts(self) -> dict[str, Any]:
        """What does not change while the run lasts."""
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
        now = time.monotonic()
        seconds = now - self._last_time
        busy, idle = self._cpu()
        own_cpu, own_memory = self._own.sample()
        total, free = self._memory()
        counters = {"busy": busy, "idle": idle, **self._network(), **self._traffic(), **self._blocks()}
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
            **{name: round(value / seconds) for name, value in step.items() if name not in ("busy", "idle")},
        }
        if self._gpus is not None:
            found["gpus"] = self._gpus.sample()
        return found

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()

    # -- the files ---------------------------------------------------------------------------------------

    def _cpu(self) -> tuple[float, float]:
        """Ticks of all cores together: busy, idle. Time that a guest took is counted in the host's."""
        with open(self._proc / "stat", "rb") as file:
            numbers = [int(word) for word in file.readline().split()[1:9]]
        idle = numbers[3] + numbers[4]
        return sum(numbers) - idle, idle

    def _memory(self) -> tuple[int, int]:
        """Bytes: all, and those that are to be had."""
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
        """Bytes through the network cards; where there are none (a container), through all but the loopback."""
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

    def _traffic(self) -> dict[str, float]:
        """Bytes through InfiniBand and RoCE ports, which the network's own counters do not know."""
        if not self._ports:
            return {}
        return {
            "fabric_in": sum(IB_WORD * _number(port / "port_rcv_data") for port in self._ports),
            "fabric_out": sum(IB_WORD * _number(port / "port_xmit_data") for port in self._ports),
        }

    def _blocks(self) -> dict[str, float]:
        read = written = 0
        with open(self._proc / "diskstats", encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if words[2] in self._disks:
                    read += int(words[5]) * SECTOR
                    written += int(words[9]) * SECTOR
        return {"disk_in": read, "disk_out": written}


class OwnProcesses:
    """The processes of the run on this node: its roots, and all below them."""

    def __init__(self, roots: Callable[[], Collection[int]], proc: Path = Path("/proc")) -> None:
        self._roots, self._proc = roots, str(proc)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._known_roots: set[int] = set()
        self._ours: dict[int, int] = {}  # pid -> CPU ticks so far
        self._strangers: set[int] = set()
        self._looks = 0

    def sample(self) -> tuple[int, int]:
        """CPU ticks since the last call, and bytes of memory. Memory that processes share counts for each of them."""
        self._look()
        ticks = memory = 0
        for pid, before in list(self._ours.items()):
            found = self._read(pid)
            if found is None:
                del self._ours[pid]
                continue
            _, used, pages = found
            ticks += max(0, used - before) if before >= 0 else 0
            memory += pages * self._page
            self._ours[pid] = used
        return ticks, memory

    def _look(self) -> None:
        """Find those that are new. Whoever was a stranger stays one, so that only new processes are read."""
        roots = set(self._roots())
        self._looks += 1
        if not roots <= self._known_roots or self._looks % FORGET_AFTER == 0:
            self._strangers.clear()
        self._known_roots = roots
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._strangers &= there
        for pid in roots & there:
            self._ours.setdefault(pid, -1)
        parents: dict[int, int] = {}
        for pid in there - self._strangers - self._ours.keys():
            found = self._read(pid)
            if found is not None:
                parents[pid] = found[0]
        grown = True
        while grown:
            born = [pid for pid, parent in parents.items() if parent in self._ours]
            for pid in born:
                self._ours[pid] = -1
                del parents[pid]
            grown = bool(born)
        self._strangers |= parents.keys()

    def _read(self, pid: int) -> tuple[int, int, int] | None:
        """Parent, CPU ticks and pages of memory; None once it is gone."""
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:
                # The name stands in brackets and may hold anything: what follows the last one is regular.
                words = file.read().rpartition(b")")[2].split()
            return int(words[1]), int(words[11]) + int(words[12]), int(words[21])
        except (OSError, IndexError, ValueError):
            return None


def memory_limit(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """The least that a control group around this process lets it have, in bytes; None where nothing is limited."""
    limits = []
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = sys / "fs" / "cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = sys / "fs" / "cgroup" / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limits.append(_number(folder / name))
            if folder == root:
                break
    found = [limit for limit in limits if 0 < limit < _UNLIMITED]
    return min(found, default=None)


def _number(path: Path) -> int:
    """The number in a file; 0 where there is none."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return 0
