"""Preflight: can every node run the job? Each agent collects facts about its node; the head agent
checks them.

The facts travel with the rendezvous, so the check adds nothing to the start-up time. Torch is not
imported. With --fitness, the agents also measure their nodes, and the head agent judges them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.rank_variables import common_variables, rank_variables
from paceline.agent.workers.started_ranks import Launch
from paceline.agent.workers.zygote.start import DROP_CWD_FROM_PATH
from paceline.contract import env
from paceline.contract.fitness import Judgement, Measurement, judge
from paceline.contract.foreign_records import make, read_object
from paceline.contract.gpus import visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder, write_atomically

Facts = dict[str, Any]

TIME_LIMIT = 30.0  # seconds for all of it
ANSWER_TIME = 6.0  # seconds of them for the answers of the members, and for the verdict after them
RESULT, VERDICT = "fitness", "fitness_verdict"
_START = f"{DROP_CWD_FROM_PATH}; from paceline.runtime.distributed.fitness import main; main()"


# -- facts about one node
# ------------------------------------------------------------------------------


def collect_facts(placement: Placement, environ: Mapping[str, str]) -> Facts:
    """Return what the head agent must know about this node. A fact that cannot be read is None,
    never an error.
    """
    devices = visible_devices(environ)
    return {
        **node_facts(),
        "host": placement.host,
        "node": placement.node,
        "ranks": placement.ranks,
        "visible_gpus": None if devices is None else len(devices),
        "slurm_gpus": _number(environ.get("SLURM_GPUS_ON_NODE", "")),
        "gpu_devices": gpu_devices(),
    }


def node_facts() -> Facts:
    """Return what nodes are compared by, in a run or in an allocation."""
    return {
        "interfaces": network.interfaces(),
        "gpu_driver": gpu_driver(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "nccl": nccl_version(),
        "paceline": __version__,
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
        problems |= dict.fromkeys(gpus)
    for name in ("torch", "nccl", "python", "gpu_driver"):
        problems |= dict.fromkeys(_version_problems(name, roster))
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


# -- the measurement (--fitness)
# ------------------------------------------------------------------------------------------


class FitnessCheck:
    """One agent's part: it measures its node; the head agent collects all numbers, and tells the
    others.
    """

    def __init__(
        self,
        launch: Launch,
        run: RunFolder,
        rendezvous: Rendezvous,
        interrupted: Callable[[], bool],
    ) -> None:
        self._launch, self._run, self._rendezvous, self._interrupted = (
            launch,
            run,
            rendezvous,
            interrupted,
        )
        self._deadline = time.monotonic() + TIME_LIMIT

    def run(self) -> list[Judgement]:
        """Return what is slow, the same on all agents. Collective."""
        measured = self._measure(self._deadline - ANSWER_TIME)
        own = {"host": self._launch.placement.host, "ranks": [asdict(each) for each in measured]}
        if not self._launch.placement.is_head:
            self._rendezvous.send({"kind": RESULT, **own}, to=0)
            message = self._await(VERDICT, {0}).get(0, {})
            return [
                Judgement(**{**each, "evidence": tuple(each["evidence"])})
                for each in message.get("found", [])
            ]
        members = self._await(RESULT, set(range(1, self._launch.placement.count)))
        reports = [own, *members.values()]
        ranks = [make(Measurement, each) for report in reports for each in report["ranks"]]
        found = list(judge(ranks))
        found += self._find_silent(reports, {each.host for each in found})
        self._record(ranks, found)
        self._rendezvous.send({"kind": VERDICT, "found": [asdict(each) for each in found]})
        return found

    def _measure(self, deadline: float) -> list[Measurement]:
        """Run the measurement on this node's ranks, and return what they wrote."""
        folder = self._run.path / "fitness"
        folder.mkdir(parents=True, exist_ok=True)
        common = {**common_variables(self._launch), env.FITNESS: str(folder)}
        if not self._launch.launch_spec.gpus:
            common[env.FITNESS_CPU] = "1"
        started = []
        numbers = [rank for rank, _ in self._launch.ranks()]
        for rank, local_rank in self._launch.ranks():
            (folder / f"rank-{rank}.json").unlink(missing_ok=True)
            started.append(
                subprocess.Popen(
                    [self._launch.launch_spec.python, "-c", _START],
                    start_new_session=True,
                    env={**common, **rank_variables(self._launch, rank, local_rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        try:
            while any(each.poll() is None for each in started) and time.monotonic() < deadline:
                if self._interrupted():
                    break
                time.sleep(0.05)
        finally:
            for each in started:
                process_tree.signal_group(each.pid, signal.SIGKILL)
                each.wait()
        return list(_read_measurements(folder, numbers))

    def _await(self, kind: str, senders: set[int]) -> dict[int, dict[str, Any]]:
        """Return one message of each sender, or of those that answer in time."""
        deadline = self._deadline + (0.0 if self._launch.placement.is_head else ANSWER_TIME)
        return self._rendezvous.gather(
            kind, senders, timeout=deadline - time.monotonic(), ended=self._interrupted
        )

    @staticmethod
    def _find_silent(reports: Iterable[Mapping[str, Any]], blamed: set[str]) -> list[Judgement]:
        """Name nodes that have measured nothing in time, although others have: torch may take long
        to import there.
        """
        silent = {str(each["host"]) for each in reports if not each["ranks"]} - blamed
        measured = {str(each["host"]) for each in reports if each["ranks"]}
        text = f"it has measured nothing within {TIME_LIMIT:.0f} s"
        return [
            Judgement(host, text, unfit=False) for host in sorted(silent - measured) if measured
        ]

    def _record(self, ranks: list[Measurement], found: list[Judgement]) -> None:
        """Leave the numbers for `paceline doctor`."""
        record = {
            "time": time.time(),
            "ranks": [asdict(each) for each in ranks],
            "found": [asdict(each) for each in found],
        }
        with suppress(OSError):
            write_atomically(self._run.fitness, json.dumps(record, indent=1) + "\n")
            (self._run.path / "fitness").rmdir()


def _read_measurements(folder: Path, ranks: Iterable[int]) -> Iterable[Measurement]:
    for rank in ranks:
        try:
            yield make(Measurement, read_object(folder / f"rank-{rank}.json"))
        except (OSError, ValueError):
            continue
        os.unlink(folder / f"rank-{rank}.json")
