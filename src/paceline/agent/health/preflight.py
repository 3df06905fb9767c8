"""Preflight: can every node run the job? Each agent collects facts about its node; the head agent
checks them.

The facts travel with the rendezvous, so the check adds nothing to the start-up time. Torch is not
imported.
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

from paceline import __version__
from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous import network
from paceline.contract.gpus import visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, write_atomically

Facts = dict[str, Any]

MIN_DISK = 256 << 20  # bytes
MIN_MEMORY = 256 << 20


# -- facts about one node
# ------------------------------------------------------------------------------


def collect_facts(placement: Placement, *, folder: Path, environ: Mapping[str, str]) -> Facts:
    """Return what the head agent must know about this node. A fact that cannot be read is None,
    never an error.
    """
    devices = visible_devices(environ)
    return {
        "host": placement.host,
        "node": placement.node,
        "ranks": placement.ranks,
        "addresses": network.addresses(),
        "interfaces": network.interfaces(),
        "visible_gpus": None if devices is None else len(devices),
        "slurm_gpus": _number(environ.get("SLURM_GPUS_ON_NODE", "")),
        "gpu_devices": gpu_devices(),
        "gpu_driver": gpu_driver(),
        "run_free": _free_bytes(folder),
        "tmp_free": _free_bytes(Path(tempfile.gettempdir())),
        "shm_free": _free_bytes(Path("/dev/shm")),
        "memory_free": free_memory(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "nccl": nccl_version(),
        "paceline": __version__,
        "pid": os.getpid(),
    }


def gpu_devices() -> int:
    """Return the number of GPU device files of this node. A container has those that it was
    given.
    """
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def gpu_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def free_memory() -> int | None:
    """Return the bytes that are available, by the kernel's own estimate."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def torch_version() -> str | None:
    """Read torch's version from its own file: importing torch takes seconds, package metadata a
    tenth of one.
    """
    folder = _torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return None
    match = re.search(r"^__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else None


def nccl_version() -> str | None:
    """Return the version of the NCCL that pip installed next to torch; None if torch has its own,
    or none.
    """
    folder = _torch_folder()
    found = sorted(folder.parent.glob("nvidia_nccl_cu*.dist-info")) if folder else []
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def _torch_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("torch")
    except (ValueError, ImportError):
        return None
    return (
        Path(spec.submodule_search_locations[0])
        if spec and spec.submodule_search_locations
        else None
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


# -- the check
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A problem with one node. If it is fatal, no rank starts, and the node is excluded from the
    next job start.
    """

    host: str
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"node {self.host}: {self.text}"


def find_problems(launch_spec: LaunchSpec, roster: Sequence[Facts]) -> list[Problem]:
    """Return all problems in the order of the nodes, fatal ones first."""
    # a set in order: several agents of one node report the same problem
    problems: dict[Problem, None] = {}
    max_gpus = max((_gpu_count(facts) or 0 for facts in roster), default=0)
    # If any node shows device files, a node with fewer than promised has lost some.
    countable = any(facts["gpu_devices"] for facts in roster)
    for facts in roster:
        expected = _expected_gpus(launch_spec, facts, max_gpus)
        gpus = _gpu_problems(launch_spec, facts, expected=expected, countable=countable)
        for problem in (*gpus, *_space_problems(facts)):
            problems[problem] = None
    for name in ("torch", "nccl", "python", "gpu_driver"):
        for problem in _version_problems(name, roster):
            problems[problem] = None
    return sorted(problems, key=lambda problem: not problem.fatal)


def _gpu_problems(
    launch_spec: LaunchSpec, facts: Facts, *, expected: int, countable: bool
) -> list[Problem]:
    if launch_spec.gpus <= 0:
        return []
    host, granted, devices = facts["host"], facts["slurm_gpus"], facts["gpu_devices"]
    if granted is not None and granted < launch_spec.gpus:
        return [Problem(host, f"Slurm granted {granted} of the {launch_spec.gpus} GPUs requested")]
    if (visible := _gpu_count(facts) or 0) < expected:
        return [Problem(host, f"{visible} of the {expected} GPUs requested are visible")]
    if countable and devices < expected:
        text = (
            f"{devices} of the {expected} GPUs requested have a device file; check that the "
            "driver is loaded"
        )
        return [Problem(host, text)]
    return []


def _gpu_count(facts: Facts) -> int | None:
    """Return how many GPUs the ranks of this agent would see; None if nothing says."""
    counts = [facts[name] for name in ("visible_gpus", "slurm_gpus", "gpu_devices")]
    return next((count for count in counts if count is not None), None)


def _expected_gpus(launch_spec: LaunchSpec, facts: Facts, max_gpus: int) -> int:
    """Return how many GPUs this agent must see. `max_gpus` is the most that any agent of the run
    sees.

    An agent with one of several ranks may see that rank's GPU alone, because the run asked for it
    or because the site binds every task that way. If another agent sees more, the site does not
    bind, and this node lacks GPUs.
    """
    if launch_spec.nproc == 1 or len(facts["ranks"]) > 1:
        return launch_spec.gpus
    return 1 if launch_spec.one_gpu_per_rank else max(1, min(launch_spec.gpus, max_gpus))


def _space_problems(facts: Facts) -> list[Problem]:
    found = []
    for name, what, minimum in (
        ("run_free", "of disk space left in the run folder", MIN_DISK),
        ("tmp_free", "of disk space left in the temporary folder", MIN_DISK),
        ("memory_free", "of memory left", MIN_MEMORY),
    ):
        free = facts[name]
        if free is not None and free < minimum:
            found.append(Problem(facts["host"], f"only {free >> 20} MB {what}", fatal=False))
    return found


def _version_problems(name: str, roster: Sequence[Facts]) -> list[Problem]:
    """Compare each node's version with the most common one (with the head node's, if there is a
    tie).
    """
    versions = [facts[name] for facts in roster]
    if len(set(versions)) <= 1:
        return []
    common = Counter(versions).most_common(1)[0][0]
    label = name.replace("_", " ")
    return [
        Problem(
            facts["host"],
            f"{label} is {facts[name] or 'missing'}, but {common or 'missing'} on the other nodes",
            fatal=name == "torch",
        )
        for facts in roster
        if facts[name] != common
    ]


def unfit_nodes(problems: Sequence[Problem]) -> list[str]:
    return sorted({problem.host for problem in problems if problem.fatal})


def exclude_nodes(job_start: JobStartFolder, hosts: Sequence[str]) -> None:
    """Add nodes to those that the run excludes when it is requeued."""
    if not hosts:
        return
    job_start.path.mkdir(parents=True, exist_ok=True)
    path = job_start.excluded_nodes
    known = path.read_text(encoding="utf-8").split() if path.exists() else []
    write_atomically(path, "".join(f"{host}\n" for host in sorted({*known, *hosts})))
