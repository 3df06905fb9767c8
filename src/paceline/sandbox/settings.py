"""What a sandbox is asked to be, where its files are, and what is written down about a living one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem, UsageError
from paceline.sandbox.processes import Process

PLAIN, NAMESPACES = "plain", "namespaces"
MAX_NODES = 200  # one /24 for all nodes, and room in it


@dataclass(frozen=True)
class Settings:
    """The shape of the cluster."""

    nodes: int = 4
    cpus: int = 8  # per node; may exceed what this machine has
    memory: int = 4000  # MB per node, as Slurm counts it
    gpus: int = 4  # fake ones, per node
    gpu_type: str = ""
    network: str = PLAIN
    accounting: bool = False
    max_array_size: int = 1001
    options: dict[str, str] = field(default_factory=dict)  # lines of slurm.conf that replace ours

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"--nodes is {self.nodes}", hint=f"a sandbox has 1 to {MAX_NODES} nodes")
        for name, least in (("cpus", 1), ("memory", 1), ("gpus", 0), ("max_array_size", 2)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is {getattr(self, name)}", hint=f"it is at least {least}")
        if self.network not in (PLAIN, NAMESPACES):
            raise UsageError(f"--network is {self.network!r}", hint=f"it is {PLAIN!r} or {NAMESPACES!r}")
        if self.gpu_type and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.gpu_type):
            raise UsageError(f"--gpu-type is {self.gpu_type!r}", hint="letters, digits, '_', '.' and '-'")
        for key, value in self.options.items():
            if not re.fullmatch(r"[A-Za-z]+", key) or "\n" in value:
                raise UsageError(f"--slurm-option is {key!r}={value!r}", hint="one KEY=VALUE of slurm.conf")

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class SandboxPaths:
    """Everything of a sandbox lies in its folder; nothing in /etc, /var or the home folder is touched."""

    folder: Path

    @property
    def record(self) -> Path:
        """What is known about the living sandbox. Absent when it is down."""
        return self.folder / "sandbox.json"

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.etc / "hosts"

    @property
    def init(self) -> Path:
        """Process 1 of a node that has namespaces of its own."""
        return self.etc / "node-init.sh"

    @property
    def munge_key(self) -> Path:
        return self.etc / "munge.key"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.run / "mariadb.socket"

    @property
    def database(self) -> Path:
        return self.folder / "database"

    @property
    def devices(self) -> Path:
        """Where the fake GPUs are."""
        return self.folder / "dev"

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def node_tmp(self, node: str) -> Path:
        return self.folder / "tmp" / node

    @property
    def created(self) -> list[Path]:
        """The folders that `up` makes and `down` removes. Logs stay."""
        names = ("etc", "run", "state", "spool", "tmp", "dev", "database")
        return [self.folder / name for name in names]

    def check(self) -> None:
        """What Slurm and the kernel cannot take as a folder."""
        longest = max(len(str(self.munge_socket)), len(str(self.database_socket))) + 12
        if longest > 107:  # munged adds a suffix, and a socket's address holds 107 bytes
            raise EnvironmentProblem(
                f"the path is too long for a socket: {self.folder}", hint="choose a shorter one by --dir"
            )
        if re.search(r"[\s#%,\[\]\"'\\=]", str(self.folder)):
            raise EnvironmentProblem(
                f"slurm.conf cannot name this folder: {str(self.folder)!r}",
                hint="choose one without spaces, quotes and any of # % , = [ ] by --dir",
            )


@dataclass
class Record:
    """A living sandbox: what was chosen for it, and its processes."""

    settings: Settings
    ports: dict[str, int]
    subnet: str = ""  # "10.x.y", with namespaces
    bridge: str = ""
    processes: dict[str, Process] = field(default_factory=dict)  # daemons and nodes by name
    owner: Process | None = None  # the process that this sandbox was made for: its end ends the need for it

    def address(self, node: str) -> str:
        return f"{self.subnet}.{number_of(node)}" if self.subnet else "127.0.0.1"

    @property
    def controller_address(self) -> str:
        return f"{self.subnet}.254" if self.subnet else "127.0.0.1"

    def cable(self, node: str) -> str:
        """The host's end of a node's virtual cable."""
        return f"{self.bridge}n{number_of(node)}"

    def save(self, paths: SandboxPaths) -> None:
        write_atomically(paths.record, json.dumps(asdict(self), indent=1) + "\n", mode=0o600)

    @classmethod
    def load(cls, paths: SandboxPaths) -> Record | None:
        try:
            data: dict[str, Any] = json.loads(paths.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        owner = data.pop("owner")
        return cls(
            settings=Settings(**data.pop("settings")),
            processes={name: Process(**each) for name, each in data.pop("processes").items()},
            owner=Process(**owner) if owner else None,
            **data,
        )


def number_of(node: str) -> int:
    return int(node.removeprefix("node"))
