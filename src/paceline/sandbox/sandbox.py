"""A real Slurm on one machine: brought up, looked at, hurt, mended and taken down."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.errors import ClusterError, UsageError
from paceline.sandbox import daemons, network
from paceline.sandbox.lifecycle import power_off, start_all, take_down
from paceline.sandbox.packages import program, require, search_path
from paceline.sandbox.processes import Process
from paceline.sandbox.settings import NAMESPACES, PLAIN, Record, SandboxPaths, Settings

READY = ("idle", "mixed", "allocated")
S = TypeVar("S", bound="Sandbox")
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Node:
    """A node as the controller sees it, and whether it is there at all."""

    name: str
    state: str
    reason: str
    cpus: str  # allocated/idle/other/total
    gres: str
    address: str
    running: bool
    cut: bool


class Sandbox:
    """A living sandbox in a folder. `Sandbox.up(folder, ...)` makes one; `Sandbox(folder)` finds it again."""

    def __init__(self, folder: Path | str) -> None:
        self.paths = SandboxPaths(Path(folder).absolute())
        record = Record.load(self.paths)
        if record is None:
            raise UsageError(f"no sandbox is up in {self.folder}", hint="paceline sandbox up")
        self.record = record

    @classmethod
    def up(
        cls: type[S],
        folder: Path | str,
        *,
        nodes: int = 4,
        cpus: int = 8,
        memory: int = 4000,
        gpus: int = 4,
        gpu_type: str = "",
        network: str = NAMESPACES,
        accounting: bool = False,
        max_array_size: int = 1001,
        options: dict[str, str] | None = None,
        owner: int | None = None,
        timeout: float = 90.0,
    ) -> S:
        """Bring a cluster up and wait until every node is idle; on any failure nothing stays behind but logs.

        `owner` is the pid of a process whose end makes the sandbox useless: see `is_orphaned`.
        """
        settings = Settings(
            nodes=nodes, cpus=cpus, memory=memory, gpus=gpus, gpu_type=gpu_type, network=network,
            accounting=accounting, max_array_size=max_array_size, options=dict(options or {}),
        )  # fmt: skip
        paths = SandboxPaths(Path(folder).absolute())
        paths.check()
        require(settings)
        if network == NAMESPACES and os.geteuid() != 0:
            raise UsageError("only root can give nodes namespaces of their own", hint=f"--network {PLAIN}")
        if Record.load(paths) is not None:
            raise UsageError(f"a sandbox is up in {paths.folder} already", hint="paceline sandbox down")
        paths.folder.mkdir(parents=True, exist_ok=True)
        try:
            start_all(paths, settings, owner=owner)
            sandbox = cls(paths.folder)
            sandbox.wait_ready(timeout=timeout)
        except BaseException:
            take_down(paths)
            raise
        return sandbox

    @property
    def folder(self) -> Path:
        return self.paths.folder

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs in its environment to speak to this cluster."""
        return {"SLURM_CONF": str(self.paths.slurm_conf)}

    @property
    def nodes(self) -> list[str]:
        return self.record.settings.names

    def run(self, argv: Sequence[str], *, check: bool = True, timeout: float = 120, input: str = "") -> Done:
        """Run a command on this machine, as a login node of the cluster."""
        done = subprocess.run(
            list(argv), env=self._variables(), timeout=timeout, text=True, capture_output=True, input=input
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(argv)} exited with {done.returncode}: {done.stderr.strip()}")
        return done

    def exec(
        self, node: str | int, argv: Sequence[str], *, capture: bool = True, timeout: float | None = None
    ) -> Done:
        """Run a command on a node, in the folder where this process is."""
        inside = list(argv)
        if self.record.settings.network == NAMESPACES:
            init = self._init(self.name(node))
            enter = [program("nsenter"), "--target", str(init.pid), "--all", "--"]
            inside = [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *argv]
        return subprocess.run(
            inside, env=self._variables(), timeout=timeout, text=True, capture_output=capture, check=False
        )

    def _variables(self) -> dict[str, str]:
        """Ours, less what an outer Slurm may have put into it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "PATH": search_path(), **self.environment}

    def name(self, node: str | int) -> str:
        """`2`, `"2"` and `"node2"` are one node."""
        name = f"node{node}" if str(node).isdigit() else str(node)
        if name not in self.nodes:
            raise UsageError(f"there is no node {node!r}", hint=f"nodes: {self.nodes[0]} to {self.nodes[-1]}")
        return name

    # -- looking ----------------------------------------------------------------------------------------

    def controller_answers(self) -> bool:
        return self.run(["scontrol", "ping"], check=False).returncode == 0

    def states(self) -> dict[str, Node]:
        """Every node, asked of the controller."""
        told = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N|%T|%C|%G|%E"]).stdout
        found = {}
        for line in told.splitlines():
            name, state, cpus, gres, reason = line.split("|", 4)
            reason = "" if reason == "none" else reason
            found[name] = Node(
                name=name, state=state, reason=reason, cpus=cpus, gres=gres,
                address=self.record.address(name), running=self.is_running(name), cut=self.is_cut(name),
            )  # fmt: skip
        return found

    def is_running(self, name: str) -> bool:
        """Whether a daemon or a node is there."""
        process = self.record.processes.get(name)
        return process is not None and process.alive()

    def is_cut(self, node: str) -> bool:
        return self.record.settings.network == NAMESPACES and network.is_cut(self.record, node)

    def wait_ready(self, *, timeout: float = 90.0, names: Sequence[str] = ()) -> None:
        """Return when the nodes can take jobs; nodes that came back but are held are resumed."""
        wanted = list(names) or self.nodes
        silent = set(wanted)  # a node that was marked down may look ready before its daemon listens
        deadline = time.monotonic() + timeout
        while True:
            for name in ("slurmctld", *wanted):
                if not self.is_running(name):
                    raise ClusterError(f"{name} has ended; it says:\n{daemons.log_tail(name, self.paths)}")
            silent = {name for name in silent if not daemons.listens(self.record, name)}
            states = self.states() if not silent and self.controller_answers() else {}
            late = [name for name in wanted if name not in states or states[name].state not in READY]
            if not late:
                return
            if time.monotonic() > deadline:
                told = "; ".join(
                    f"{name}: {states[name].state if name in states else 'unknown'}" for name in late
                )
                raise ClusterError(
                    f"not ready after {timeout:.0f} s: {told}\n{daemons.log_tail(late[0], self.paths)}",
                    hint=f"the controller says:\n{daemons.log_tail('slurmctld', self.paths)}",
                )
            # A star means "does not answer": only a node that answers can be resumed.
            held = [name for name in late if states and states[name].state in ("down", "drained", "draining")]
            for name in held:
                self.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
            time.sleep(0.1)

    # -- faults -----------------------------------------------------------------------------------------

    def kill_node(self, node: str | int, *, mark_down: bool = False) -> None:
        """A power cut: the daemon and everything that the node runs is gone at once.

        Slurm notices by itself after `SlurmdTimeout`; with `tell` it is told now.
        """
        name = self.name(node)
        power_off(self.paths, self.record, name)
        self.record.save(self.paths)
        if mark_down:
            self.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=power cut"])

    def start_node(self, node: str | int, *, timeout: float = 90.0) -> None:
        """Power on; returns when the node can take jobs."""
        name = self.name(node)
        if not self.is_running(name):
            daemons.start_node(self.paths, self.record, name)
        self.wait_ready(timeout=timeout, names=[name])

    def cut(self, node: str | int) -> None:
        """Pull the network cable: the node lives on, alone."""
        network.set_cable(self.record, self._with_cable(node), connected=False)

    def heal(self, node: str | int) -> None:
        """Plug the cable in again."""
        network.set_cable(self.record, self._with_cable(node), connected=True)

    def restart_controller(self, *, kill: bool = False, timeout: float = 90.0) -> None:
        """Stop the controller, gracefully or by a crash, and start it again; running jobs go on meanwhile."""
        controller = self.record.processes.get("slurmctld")
        if controller is not None:
            controller.kill() if kill else controller.end(grace=30.0)
        daemons.start_controller(self.paths, self.record)
        deadline = time.monotonic() + timeout
        while not self.controller_answers():
            if time.monotonic() > deadline:
                raise ClusterError(f"no answer:\n{daemons.log_tail('slurmctld', self.paths)}")
            time.sleep(0.1)

    def repair(self, *, timeout: float = 90.0) -> None:
        """Undo every fault: the controller runs, all nodes run, are plugged in and can take jobs."""
        if not self.is_running("slurmctld"):
            self.restart_controller(timeout=timeout)
        for name in self.nodes:
            if not self.is_running(name):
                daemons.start_node(self.paths, self.record, name)
            elif self.is_cut(name):
                self.heal(name)
        self.wait_ready(timeout=timeout)

    def down(self) -> None:
        """End every process, remove every interface. Logs stay in the folder. Safe to repeat."""
        take_down(self.paths)

    def _with_cable(self, node: str | int) -> str:
        if self.record.settings.network != NAMESPACES:
            raise UsageError(
                "the nodes of a plain sandbox share one network: there is no cable to pull",
                hint=f"paceline sandbox up --network {NAMESPACES}",
            )
        return self.name(node)

    def _init(self, name: str) -> Process:
        outer = self.record.processes.get(name)
        init = network.namespaces_of(outer) if outer else None
        if init is None:
            raise ClusterError(f"{name} is not running", hint=f"paceline sandbox start-node {name}")
        return init


def is_orphaned(folder: Path) -> bool:
    """Whether a sandbox is up there for a process that has ended."""
    record = Record.load(SandboxPaths(folder))
    return record is not None and record.owner is not None and not record.owner.alive()
