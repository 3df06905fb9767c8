"""Is every node fit to run? Each agent gathers facts of its own node, fast and without torch; the head judges.

The facts travel in the agents' meeting, so that the check costs no start-up time of its own.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.placement import Place
from paceline.agent.rendezvous import network
from paceline.contract.gpus import visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, write_atomically

Facts = dict[str, Any]

LITTLE_DISK = 256 << 20  # bytes
LITTLE_MEMORY = 256 << 20


# -- facts of one node ---------------------------------------------------------------------------------


def gather(place: Place, *, folder: Path, environ: Mapping[str, str]) -> Facts:
    """What the head must know of this node. A fact that cannot be had is None, never an error."""
    return {
        "host": place.host,
        "node": place.node,
        "ranks": place.ranks,
        "addresses": network.addresses(),
        "visible_gpus": visible_gpus(environ),
        "slurm_gpus": _number(environ.get("SLURM_GPUS_ON_NODE", "")),
        "gpu_devices": gpu_devices(),
        "gpu_driver": gpu_driver(),
        "run_free": _free_bytes(folder),
        "tmp_free": _free_bytes(Path(tempfile.gettempdir())),
        "shm_free": _free_bytes(Path("/dev/shm")),
        "memory_free": free_memory(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "pid": os.getpid(),
    }


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """How many GPUs the environment lets a process see; None: it does not say."""
    devices = visible_devices(environ)
    return None if devices is None else len(devices)


def gpu_devices() -> int:
    """Device files of this node (a container shows those that it was given)."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def gpu_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def free_memory() -> int | None:
    """Bytes that can still be had, by the kernel's own estimate."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def torch_version() -> str | None:
    """Read from the package's own file: importing torch takes seconds, and package metadata tenths of one."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError, ImportError):
        return None
    match = re.search(r"^__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else None


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


# -- the judgement -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one node. Fatal: ranks are not started, and the node is left out next time."""

    host: str
    what: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"node {self.host}: {self.what}"


def judge(launch_spec: LaunchSpec, roster: Sequence[Facts]) -> list[Problem]:
    """All problems of all nodes; the order of nodes, fatal ones first."""
    problems: dict[Problem, None] = {}
    most = max((_seen(facts) for facts in roster), default=0)
    # Where devices can be counted at all: fewer of them than promised have fallen off the bus.
    countable = any(facts["gpu_devices"] for facts in roster)
    for facts in roster:
        gpus = _gpu_problems(
            launch_spec, facts, expected=_expected_gpus(launch_spec, facts, most), countable=countable
        )
        for problem in (*gpus, *_room_problems(facts)):
            problems[problem] = None  # agents of one node say the same thing once
    for name in ("torch", "python", "gpu_driver"):
        for problem in _differing(name, roster):
            problems[problem] = None
    return sorted(problems, key=lambda problem: not problem.fatal)


def _gpu_problems(launch_spec: LaunchSpec, facts: Facts, *, expected: int, countable: bool) -> list[Problem]:
    if launch_spec.gpus <= 0:
        return []
    host, granted, devices = facts["host"], facts["slurm_gpus"], facts["gpu_devices"]
    if granted is not None and granted < launch_spec.gpus:
        return [Problem(host, f"Slurm granted {granted} of the {launch_spec.gpus} GPUs that were asked for")]
    if (seen := _seen(facts)) < expected:
        return [Problem(host, f"it sees {seen} of the {expected} GPUs that were asked for")]
    if countable and devices < expected:
        return [
            Problem(
                host,
                f"it has {devices} of the {expected} GPU devices that were asked for: is the driver loaded?",
            )
        ]
    return []


def _seen(facts: Facts) -> int:
    """The GPUs that ranks of this agent would see, as far as anybody says."""
    told = [facts[name] for name in ("visible_gpus", "slurm_gpus", "gpu_devices")]
    return next((number for number in told if number is not None), 0)


def _expected_gpus(launch_spec: LaunchSpec, facts: Facts, most: int) -> int:
    """How many this agent must see. `most` is what the best-off agent of the run sees.

    A agent of one rank among several may have been given that rank's GPU alone: because the run asked for it, or
    because the site binds every task so. Where another one sees more, it is no such binding but a node in need.
    """
    if launch_spec.nproc == 1 or len(facts["ranks"]) > 1:
        return launch_spec.gpus
    return 1 if launch_spec.one_gpu_per_rank else max(1, min(launch_spec.gpus, most))


def _room_problems(facts: Facts) -> list[Problem]:
    found = []
    for name, what, least in (
        ("run_free", "of disk is left in the run folder", LITTLE_DISK),
        ("tmp_free", "of disk is left in the temporary folder", LITTLE_DISK),
        ("memory_free", "of memory is left", LITTLE_MEMORY),
    ):
        left = facts[name]
        if left is not None and left < least:
            found.append(Problem(facts["host"], f"only {left >> 20} MB {what}", fatal=False))
    return found


def _differing(name: str, roster: Sequence[Facts]) -> list[Problem]:
    """Nodes whose version is not that of the most (of the head, where no version has the most)."""
    said = [facts[name] for facts in roster]
    if len(set(said)) <= 1:
        return []
    usual = Counter(said).most_common(1)[0][0]
    return [
        Problem(
            facts["host"],
            f"{name.replace('_', ' ')} is {facts[name] or 'absent'}, on the other nodes it is {usual or 'absent'}",
            fatal=name == "torch",
        )
        for facts in roster
        if facts[name] != usual
    ]


def unfit_hosts(problems: Sequence[Problem]) -> list[str]:
    return sorted({problem.host for problem in problems if problem.fatal})


def mark_unfit(job_start: JobStartFolder, hosts: Sequence[str]) -> None:
    """Leave word for the batch script: these nodes are left out when the job is requeued."""
    if not hosts:
        return
    job_start.path.mkdir(parents=True, exist_ok=True)
    known = job_start.unfit.read_text(encoding="utf-8").split() if job_start.unfit.exists() else []
    write_atomically(job_start.unfit, "".join(f"{host}\n" for host in sorted({*known, *hosts})))


# -- for people ----------------------------------------------------------------------------------------


def table(launch_spec: LaunchSpec, roster: Sequence[Facts]) -> str:
    """One line per node, the bad ones marked; then the problems in words."""
    problems = judge(launch_spec, roster)
    bad = set(unfit_hosts(problems))
    head = ("", "node", "ranks", "gpus", "cpus", "memory", "disk", "torch", "python", "address")
    rows = [head]
    for facts in roster:
        rows.append(
            (
                "✗" if facts["host"] in bad else "✓",
                facts["host"],
                _span(facts["ranks"]),
                _gpus_told(facts),
                str(facts["cpus"]),
                _size(facts["memory_free"]),
                _size(facts["run_free"]),
                facts["torch"] or "-",
                facts["python"],
                next(iter(facts["addresses"]), "-"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, *map(str, problems)])


def _gpus_told(facts: Facts) -> str:
    for name in ("visible_gpus", "slurm_gpus", "gpu_devices"):
        if facts[name] is not None:
            return str(facts[name])
    return "-"


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ",".join(map(str, ranks))


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 30):.1f} GB"
