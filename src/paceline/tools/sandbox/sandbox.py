"""A real Slurm cluster on one machine: start it, inspect it, break it and stop it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ClusterError, PacelineError, UsageError
from paceline.tools.sandbox import daemons, network
from paceline.tools.sandbox.packages import program, require, search_path
from paceline.tools.sandbox.processes import Process, kill_all, node_processes
from paceline.tools.sandbox.settings import NAMESPACES, PLAIN, SandboxPaths, SandboxRecord, Settings

READY = ("idle", "mixed", "allocated")
S = TypeVar("S", bound="Sandbox")
Completed = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Node:
    """A node as the controller reports it, and whether it is running and connected."""

    name: str
    state: str
    reason: str
    cpus: str  # allocated/idle/other/total
    address: str
    running: bool
    cut: bool


class Sandbox:
    """A running sandbox. `Sandbox.up(folder, ...)` starts one, `Sandbox(folder)` opens one that is
    running.
    """

    def __init__(self, folder: Path | str) -> None:
        self.paths = SandboxPaths(Path(folder).absolute())
        record = SandboxRecord.load(self.paths)
        if record is None:
            raise UsageError(
                f"No sandbox is running in {self.folder}.",
                hint=f"Start one with `paceline sandbox up{self.paths.dir_flag}`.",
            )
        self.record = record

    @classmethod
    def up(
        cls: type[S],
        folder: Path | str,
        *,
        owner: int | None = None,
        timeout: float = 90.0,
        **settings: Any,
    ) -> S:
        """Start a cluster and wait until every node is idle. After a failure only the logs remain.

        `settings` are those of `Settings`.
        `owner` is the pid of the process that needs the sandbox. It goes into the sandbox's record.
        """
        wanted = Settings(**{"network": NAMESPACES, **settings})
        paths = SandboxPaths(Path(folder).absolute())
        paths.check()
        require(wanted)
        if wanted.network == NAMESPACES and os.geteuid() != 0:
            raise UsageError(f"--network {NAMESPACES} needs root.", hint=f"Use --network {PLAIN}.")
        if SandboxRecord.load(paths) is not None:
            raise UsageError(
                f"A sandbox is already running in {paths.path}.",
                hint=f'Use it: eval "$(paceline sandbox env{paths.dir_flag})". To stop it: '
                "paceline sandbox"
                f" down{paths.dir_flag}",
            )
        daemons.make_private(paths.path)
        try:
            start_all(paths, wanted, owner=owner)
            sandbox = cls(paths.path)
            sandbox.wait_ready(timeout=timeout)
        except BaseException:
            stop_all(paths)
            raise
        return sandbox

    @property
    def folder(self) -> Path:
        return self.paths.path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a command needs to use this cluster."""
        return {"SLURM_CONF": str(self.paths.slurm_conf)}

    @property
    def nodes(self) -> list[str]:
        return self.record.settings.names

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float = 120, input: str = ""
    ) -> Completed:
        """Run a command on this machine as if it were the cluster's login node."""
        done = subprocess.run(
            list(argv),
            env=self._variables(),
            timeout=timeout,
            text=True,
            capture_output=True,
            input=input,
        )
        if check and done.returncode:
            raise ClusterError(
                f"`{' '.join(argv)}` failed with code {done.returncode}: {done.stderr.strip()}."
            )
        return done

    def exec(
        self,
        node: str | int,
        argv: Sequence[str],
        *,
        capture: bool = True,
        timeout: float | None = None,
    ) -> Completed:
        """Run a command on a node, in the current folder."""
        inside = list(argv)
        if self.record.settings.network == NAMESPACES:
            init = self._init(self.name(node))
            enter = [program("nsenter"), "--target", str(init.pid), "--all", "--"]
            inside = [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *argv]
        return subprocess.run(
            inside,
            env=self._variables(),
            timeout=timeout,
            text=True,
            capture_output=capture,
            check=False,
        )

    def _variables(self) -> dict[str, str]:
        """Return our environment without the variables of an outer Slurm job."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**ours, "PATH": search_path(), **self.environment}

    def name(self, node: str | int) -> str:
        """Return a node's name: `2`, `"2"` and `"node2"` mean the same node."""
        name = f"node{node}" if str(node).isdigit() else str(node)
        if name not in self.nodes:
            raise UsageError(
                f"There is no node {node!r}.",
                hint=f"The nodes are {self.nodes[0]} to {self.nodes[-1]}.",
            )
        return name

    # -- state
    # ------------------------------------------------------------------------------------------

    def controller_responds(self) -> bool:
        return self.run(["scontrol", "ping"], check=False).returncode == 0

    def states(self) -> dict[str, Node]:
        """Return the state of every node, as the controller reports it."""
        output = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N|%T|%C|%E"]).stdout
        found = {}
        for line in output.splitlines():
            name, state, cpus, reason = line.split("|", 3)
            reason = "" if reason == "none" else reason
            found[name] = Node(
                name=name,
                state=state,
                reason=reason,
                cpus=cpus,
                address=self.record.address(name),
                running=self.is_running(name),
                cut=self.is_cut(name),
            )
        return found

    def is_running(self, name: str) -> bool:
        """Return whether a daemon or a node is running."""
        process = self.record.processes.get(name)
        return process is not None and process.alive()

    def is_cut(self, node: str) -> bool:
        return self.record.settings.network == NAMESPACES and network.is_cut(self.record, node)

    def wait_ready(self, *, timeout: float = 90.0, names: Sequence[str] = ()) -> None:
        """Wait until the nodes accept jobs, and resume those that are back but down or drained."""
        wanted = list(names) or self.nodes
        starting = set(wanted)  # a node that was marked down may look ready before its daemon is
        deadline = time.monotonic() + timeout
        while True:
            for name in ("slurmctld", *wanted):
                if not self.is_running(name):
                    tail = daemons.log_tail(name, self.paths)
                    raise ClusterError(f"{name} has exited. Its log ends with:\n{tail}")
            starting = {name for name in starting if not self._accepts(name)}
            states = self.states() if not starting and self.controller_responds() else {}
            waiting = [
                name for name in wanted if name not in states or states[name].state not in READY
            ]
            if not waiting:
                return
            if time.monotonic() > deadline:
                listed = ", ".join(
                    f"{name} is {states[name].state if name in states else 'unknown'}"
                    for name in waiting
                )
                tail = daemons.log_tail(waiting[0], self.paths)
                raise ClusterError(
                    f"Not ready after {timeout:.0f} s: {listed}. The log of {waiting[0]} ends "
                    f"with:\n{tail}",
                    hint="The controller's log ends "
                    f"with:\n{daemons.log_tail('slurmctld', self.paths)}",
                )
            # A state with a star means that the node does not respond, and then it cannot be
            # resumed.
            for name in waiting:
                if states and states[name].state in ("down", "drained", "draining"):
                    self.run(
                        ["scontrol", "update", f"nodename={name}", "state=resume"], check=False
                    )
            time.sleep(0.1)

    def _accepts(self, name: str) -> bool:
        return daemons.accepts(self.record.ports[name], host=self.record.address(name))

    # -- faults
    # -----------------------------------------------------------------------------------------

    def kill_node(self, node: str | int, *, mark_down: bool = False) -> None:
        """Cut a node's power: its daemon and everything it runs are gone at once.

        Slurm notices after `SlurmdTimeout`, or at once with `mark_down`.
        """
        name = self.name(node)
        power_off(self.paths, self.record, name)
        self.record.save(self.paths)
        if mark_down:
            self.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=power cut"])

    def start_node(self, node: str | int, *, timeout: float = 90.0) -> None:
        """Switch a node on, and wait until it accepts jobs."""
        name = self.name(node)
        if not self.is_running(name):
            daemons.start_node(self.paths, self.record, name)
        self.wait_ready(timeout=timeout, names=[name])

    def cut(self, node: str | int) -> None:
        """Disconnect a node from the network; it keeps running."""
        network.set_cable(self.record, self._isolated_node(node), connected=False)

    def heal(self, node: str | int) -> None:
        """Reconnect a node to the network."""
        network.set_cable(self.record, self._isolated_node(node), connected=True)

    def restart_controller(self, *, kill: bool = False, timeout: float = 90.0) -> None:
        """Stop the controller, gracefully or with SIGKILL, and start it again. Jobs keep running
        meanwhile.
        """
        controller = self.record.processes.get("slurmctld")
        if controller is not None:
            controller.kill() if kill else controller.end(grace=30.0)
        daemons.start_controller(self.paths, self.record)
        deadline = time.monotonic() + timeout
        while not self.controller_responds():
            if time.monotonic() > deadline:
                tail = daemons.log_tail("slurmctld", self.paths)
                raise ClusterError(f"The controller does not respond. Its log ends with:\n{tail}")
            time.sleep(0.1)

    def down(self) -> None:
        """Stop every process and remove every interface. The logs stay. Safe to repeat."""
        stop_all(self.paths)

    def _isolated_node(self, node: str | int) -> str:
        if self.record.settings.network != NAMESPACES:
            raise UsageError(
                "Nodes of a plain sandbox share this machine's network, so they cannot be "
                "disconnected.",
                hint="Start the sandbox with `paceline sandbox up --network "
                f"{NAMESPACES}{self.paths.dir_flag}`.",
            )
        return self.name(node)

    def _init(self, name: str) -> Process:
        outer = self.record.processes.get(name)
        init = network.find_init(outer) if outer else None
        if init is None:
            command = f"paceline sandbox start-node{self.paths.dir_flag} {name}"
            raise ClusterError(f"{name} is not running.", hint=f"Start it with `{command}`.")
        return init


def start_all(paths: SandboxPaths, settings: Settings, *, owner: int | None) -> None:
    """Allocate addresses, write the files and start the daemons, recording each one as soon as it
    runs.
    """
    with network.allocation_lock():
        names = ["slurmctld", "slurmdbd", *settings.names]
        isolated = settings.network == NAMESPACES
        record = SandboxRecord(
            settings=settings,
            ports=dict(zip(names, network.free_ports(paths.path, len(names)), strict=True)),
            subnet=network.free_subnet(paths.path) if isolated else "",
            bridge=network.bridge_name(paths.path) if isolated else "",
            database=daemons.make_database_folder() if settings.accounting else "",
            owner=Process.of(owner) if owner else None,
        )
        record.save(paths)
        daemons.write_files(paths, record)
        if isolated:
            network.create_bridge(record)
        daemons.start_munged(paths, record)
        if settings.accounting:
            daemons.start_accounting(paths, record)
        daemons.start_controller(paths, record)
        for node in settings.names:
            daemons.start_node(paths, record, node)


def stop_all(paths: SandboxPaths) -> bool:
    """Stop everything in the record, and return whether there was one. It remains if something
    cannot be stopped.
    """
    record = SandboxRecord.load(paths)
    if record is None:
        return False
    for node in record.settings.names:
        power_off(paths, record, node)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        if process := record.processes.get(name):
            process.end()
    network.remove(record)
    if record.database:
        shutil.rmtree(record.database, ignore_errors=True)
    for folder in paths.created:
        shutil.rmtree(folder, ignore_errors=True)
    paths.record.unlink(missing_ok=True)
    return True


def power_off(paths: SandboxPaths, record: SandboxRecord, name: str) -> None:
    process = record.processes.pop(name, None)
    if record.settings.network == NAMESPACES:
        if process is not None:
            # The kernel kills all processes of a namespace together with its first one.
            kill_all([*process.children(), process])
        return
    if process is not None:
        process.signal(signal.SIGKILL)  # first, so that it starts no more processes
    log = paths.log(f"slurmd-{name}")
    for _ in range(10):  # a process may have started another just before it was killed
        found = node_processes(node=name, log=log, slurm_conf=paths.slurm_conf)
        if not found:
            break
        kill_all(found)
    else:
        raise PacelineError(
            f"Cannot stop {name}: processes {[each.pid for each in found]} are still running."
        )
    if process is not None:
        process.wait(30.0)
