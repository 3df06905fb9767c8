"""This process's control groups: the job's limits on memory and CPU time, and how often it has hit
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # at least; cgroup v1 reports "no limit" as a huge number


def memory_limit(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """Return the lowest memory limit in bytes; None if there is none."""
    limits = [_limit(folder, unified) for folder, unified in _folders("memory", proc, sys)]
    return min((limit for limit in limits if limit is not None), default=None)


def out_of_memory_kills(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Return how many processes of the job the kernel has killed because memory was used up."""
    counts = [0]
    for folder, unified in _folders("memory", proc, sys):
        # Groups above the job's have no limit, and count what happens to other jobs.
        if _limit(folder, unified) is not None:
            counts.append(
                _fields(folder / ("memory.events" if unified else "memory.oom_control")).get(
                    "oom_kill", 0
                )
            )
    return max(counts)


def cpu_quota(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[int, int]:
    """Return the periods with a limit of CPU time, and those in which it was used up, of the group
    that has been throttled most.
    """
    stats = [_fields(folder / "cpu.stat") for folder, _ in _folders("cpu", proc, sys)]
    found = [(each.get("nr_periods", 0), each.get("nr_throttled", 0)) for each in stats]
    return max(found, key=lambda each: (each[1], each[0]), default=(0, 0))


def _folders(controller: str, proc: Path, sys: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's groups and of those above, and whether they are of
    cgroup v2.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = sys / "fs" / "cgroup"
        elif controller in controllers.split(","):
            root = sys / "fs" / "cgroup" / controller
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, number == "0"
            if folder == root:
                break


def _limit(folder: Path, unified: bool) -> int | None:
    try:
        limit = int((folder / ("memory.max" if unified else "memory.limit_in_bytes")).read_bytes())
    except (OSError, ValueError):  # "max", for one
        return None
    return limit if 0 < limit < _UNLIMITED else None


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line; empty if there is no
    such file.
    """
    found = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, number = line.partition(" ")
            if number.strip().isdigit():
                found[name] = int(number)
    except OSError:
        pass
    return found
