"""A sandbox's settings, its paths, and the record of one that is running."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.run_folder import Entry, write_atomically
from paceline.errors import EnvironmentProblem, UsageError
from paceline.spec.home_path import state_folder
from paceline.tools.sandbox.processes import Process

PLAIN, NAMESPACES = "plain", "namespaces"
MAX_NODES = 200  # all nodes share one /24


@dataclass(frozen=True)
class Settings:
    """The shape of the cluster."""

    nodes: int = 4
    cpus: int = 8  # per node; may exceed this machine's
    memory: int = 4000  # MB per node
    gpus: int = 4  # fake GPUs per node
    gpu_type: str = ""
    network: str = PLAIN
    accounting: bool = False
    max_array_size: int = 1001
    options: dict[str, str] = field(default_factory=dict)  # override lines of slurm.conf

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"Invalid --nodes {self.nodes}.", hint=f"Use 1 to {MAX_NODES} nodes.")
        for name, minimum in (("cpus", 1), ("memory", 1), ("gpus", 0), ("max_array_size", 2)):
            if getattr(self, name) < minimum:
                flag = name.replace("_", "-")
                raise UsageError(
                    f"Invalid --{flag} {getattr(self, name)}.", hint=f"Use at least {minimum}."
                )
        if self.network not in (PLAIN, NAMESPACES):
            raise UsageError(
                f"Invalid --network {self.network!r}.", hint=f"Use {PLAIN} or {NAMESPACES}."
            )
        for key, value in self.options.items():
            if not re.fullmatch(r"[A-Za-z]+", key) or not value or "\n" in value:
                raise UsageError(
                    f"Invalid --slurm-option {f'{key}={value}'!r}.",
                    hint="Use KEY=VALUE, as in slurm.conf.",
                )

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]


def default_folder() -> Path:
    """Return $PACELINE_SANDBOX, or a folder for state in the home folder."""
    if folder := os.environ.get(env.SANDBOX):
        return Path(folder)
    return state_folder("sandbox")


@dataclass(frozen=True)
class SandboxPaths:
    """The paths of a sandbox. All its files are in its folder; nothing else on the machine is
    touched.
    """

    path: Path

    record = Entry("sandbox.json")  # the record of a running sandbox; absent when it is down
    etc = Entry("etc")
    slurm_conf = Entry("etc/slurm.conf")
    hosts = Entry("etc/hosts")
    # the script that runs as process 1 of a node with its own namespaces
    init = Entry("etc/node-init.sh")
    munge_key = Entry("etc/munge.key")
    run = Entry("run")
    munge_socket = Entry("run/munge.socket")
    devices = Entry("dev")  # the folder of the fake GPUs

    @property
    def dir_flag(self) -> str:
        """What a command needs to find this sandbox: nothing if it is the default one."""
        return (
            ""
            if self.path == default_folder().absolute()
            else f" --dir {shlex.quote(str(self.path))}"
        )

    def log(self, name: str) -> Path:
        return self.path / "log" / f"{name}.log"

    def node_tmp(self, node: str) -> Path:
        return self.path / "tmp" / node

    @property
    def created(self) -> list[Path]:
        """The folders that `up` creates and `down` removes. Logs stay."""
        names = ("etc", "run", "state", "spool", "tmp", "dev")
        return [self.path / name for name in names]

    def check(self) -> None:
        """Raise if Slurm cannot use the folder."""
        if re.search(r"[\s#%,\[\]\"'\\=]", str(self.path)):
            raise EnvironmentProblem(
                f"slurm.conf cannot contain the path {str(self.path)!r}.",
                hint="Choose one with --dir that has no spaces, quotes or any of # % , = [ ].",
            )


@dataclass
class SandboxRecord:
    """A running sandbox: its settings, addresses and processes."""

    settings: Settings
    ports: dict[str, int]
    subnet: str = ""  # "10.x.y", with namespaces
    bridge: str = ""
    # the folder of the accounting database, with its socket; only its user can enter it
    database: str = ""
    processes: dict[str, Process] = field(default_factory=dict)  # daemons and nodes, by name
    # the process that needs this sandbox; without it the sandbox is orphaned
    owner: Process | None = None

    def address(self, node: str) -> str:
        return f"{self.subnet}.{node_number(node)}" if self.subnet else "127.0.0.1"

    @property
    def controller_address(self) -> str:
        return f"{self.subnet}.254" if self.subnet else "127.0.0.1"

    @property
    def database_socket(self) -> str:
        return f"{self.database}/socket"

    def cable(self, node: str) -> str:
        """The host's end of a node's virtual cable."""
        return f"{self.bridge}n{node_number(node)}"

    def save(self, paths: SandboxPaths) -> None:
        write_atomically(paths.record, json.dumps(asdict(self), indent=1) + "\n", mode=0o600)

    @classmethod
    def load(cls, paths: SandboxPaths) -> SandboxRecord | None:
        try:
            data: dict[str, Any] = json.loads(paths.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        owner = data.pop("owner")
        return cls(
            settings=Settings(**data.pop("settings")),
            processes={name: Process(**fields) for name, fields in data.pop("processes").items()},
            owner=Process(**owner) if owner else None,
            **data,
        )


def node_number(node: str) -> int:
    return int(node.removeprefix("node"))
