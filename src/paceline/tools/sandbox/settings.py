"""The settings of a sandbox, where its files are, and what is in those that Slurm reads."""

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
from paceline.spec.user_files import state_folder
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


def slurm_conf(paths: SandboxPaths, record: SandboxRecord, *, user: str) -> str:
    """Return slurm.conf: a small cluster with short intervals that a busy machine can still
    meet.
    """
    settings = record.settings
    lines = {
        "ClusterName": "sandbox",
        "SlurmctldHost": f"localhost({record.controller_address})",
        "SlurmctldPort": str(record.ports["slurmctld"]),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        # A requeued job can restart only after its old credential has expired (default 120 s,
        # minimum 5 s). A busy machine takes a few seconds to start a step, and the credential must
        # still be valid then.
        "AuthInfo": f"socket={paths.munge_socket},cred_expire=12",
        "StateSaveLocation": str(paths.path / "state"),
        "SlurmdSpoolDir": str(paths.path / "spool" / "%n"),
        "SlurmctldPidFile": str(paths.run / "slurmctld.pid"),
        "SlurmdPidFile": str(paths.run / "slurmd-%n.pid"),
        "SlurmctldLogFile": str(paths.log("slurmctld")),
        "SlurmdLogFile": str(paths.log("slurmd-%n")),
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        # Nodes may have more resources than this machine, and no cgroup limits them.
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        # nodes share /tmp, where PMIx would create equal names
        "TmpFS": str(paths.path / "tmp" / "%n"),
        "PlugStackConfig": "/dev/null",
        "MailProg": "/bin/true",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=10",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(max(1, settings.memory // settings.cpus)),
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=5,bf_interval=5,batch_sched_delay=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": "1",
        "MaxArraySize": str(settings.max_array_size),
        # a node that comes back is used again, whatever the reason it was down
        "ReturnToService": "2",
        "SlurmctldTimeout": "60",
        "SlurmdTimeout": "40",
        "MessageTimeout": "15",
        "BatchStartTimeout": "60",
        "UnkillableStepTimeout": "180",
        "KillWait": "5",
        "MinJobAge": "900",
        "InactiveLimit": "0",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": str(paths.log("jobcomp")),
    }
    if settings.gpus:
        lines["GresTypes"] = "gpu"
    if settings.accounting:
        lines |= _accounting(paths, record)
    _override(lines, settings.options)
    text = [f"{key}={value}" for key, value in lines.items()]
    return "\n".join([*text, *_nodes(record), *_partitions(user), ""])


def _accounting(paths: SandboxPaths, record: SandboxRecord) -> dict[str, str]:
    lines = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": record.controller_address,
        "AccountingStoragePort": str(record.ports["slurmdbd"]),
        # slurmdbd reads the munge socket from here, not from AuthInfo.
        "AccountingStoragePass": str(paths.munge_socket),
        "AccountingStoreFlags": "job_comment",
    }
    if record.settings.gpus:
        lines["AccountingStorageTRES"] = "gres/gpu"
    return lines


def _override(lines: dict[str, str], options: dict[str, str]) -> None:
    """Replace lines by the user's options. Slurm's keys are case-insensitive."""
    known = {key.lower(): key for key in lines}
    for key, value in options.items():
        lines[known.get(key.lower(), key)] = value


def _nodes(record: SandboxRecord) -> list[str]:
    settings = record.settings
    kind = (
        f"gpu:{settings.gpu_type}:{settings.gpus}" if settings.gpu_type else f"gpu:{settings.gpus}"
    )
    gres = f" Gres={kind}" if settings.gpus else ""
    found = []
    for name in settings.names:
        host = name if settings.network == NAMESPACES else "localhost"
        found.append(
            f"NodeName={name} NodeHostname={host} NodeAddr={record.address(name)} "
            f"Port={record.ports[name]} "
            f"CPUs={settings.cpus} RealMemory={settings.memory}{gres} State=UNKNOWN"
        )
    return found


def _partitions(user: str) -> list[str]:
    """Return the partitions: `high` preempts jobs in `low` at once, and those in `grace` ten
    seconds after SIGTERM.

    A node daemon that is not root's runs every job as its own user, so nobody else may submit one.
    Slurm always admits
    `SlurmUser` and root, whatever the groups.
    """
    allowed = "" if user == "root" else " AllowGroups=root"
    every = f"Nodes=ALL MaxTime=INFINITE State=UP{allowed}"
    return [
        f"PartitionName=main {every} Default=YES PriorityTier=10",
        f"PartitionName=low {every} PriorityTier=1",
        f"PartitionName=grace {every} PriorityTier=1 GraceTime=10",
        f"PartitionName=high {every} PriorityTier=100 PreemptMode=OFF",
    ]


def gres_conf(paths: SandboxPaths, record: SandboxRecord) -> str:
    settings = record.settings
    if not settings.gpus:
        return "AutoDetect=off\n"
    last = settings.gpus - 1
    files = f"{paths.devices}/nvidia{'[0-' + str(last) + ']' if last else '0'}"
    kind = f" Type={settings.gpu_type}" if settings.gpu_type else ""
    nodes = "".join(f"NodeName={name} Name=gpu{kind} File={files}\n" for name in settings.names)
    return f"AutoDetect=off\n{nodes}"


def cgroup_conf() -> str:
    """Return cgroup.conf. No cgroup is used, but naming the plugin skips a detection that fails in
    namespaces.
    """
    return "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(paths: SandboxPaths, record: SandboxRecord, *, user: str, password: str) -> str:
    lines = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={paths.munge_socket}",
        "DbdHost": "localhost",
        "DbdPort": str(record.ports["slurmdbd"]),
        "SlurmUser": user,
        "PidFile": str(paths.run / "slurmdbd.pid"),
        "LogFile": str(paths.log("slurmdbd")),
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",  # the client library then uses the socket in MYSQL_UNIX_PORT
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def database_conf(record: SandboxRecord, *, user: str) -> str:
    lines = {
        "user": user,
        "datadir": f"{record.database}/data",
        "socket": record.database_socket,
        "pid-file": f"{record.database}/pid",
        "innodb_buffer_pool_size": "64M",
        "innodb_log_file_size": "16M",
        "innodb_lock_wait_timeout": "900",
        "innodb_flush_log_at_trx_commit": "0",
        "max_connections": "20",
    }
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    return f"[mariadbd]\n{text}skip-networking\nskip-log-bin\n"


def hosts(record: SandboxRecord, *, machine: str) -> str:
    """Return /etc/hosts of the nodes: all nodes, and the machine that submits."""
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost",
        f"{record.controller_address} {machine} controller",
    ]
    lines += [f"{record.address(name)} {name}" for name in record.settings.names]
    return "\n".join(lines) + "\n"


NODE_INIT = """\
#!/bin/bash
# Process 1 of a node. Arguments: NAME ADDRESS HOSTS-FILE MEMORY-MB, then its daemon's command.
set -eu
hostname "$1"
mount --bind "$3" /etc/hosts
mount -t tmpfs -o "size=${4}m,mode=1777" tmpfs /dev/shm
ip link set lo up
# The host connects the network interface.
for _ in {1..600}; do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip address add "$2/24" dev eth0
ip link set eth0 up
shift 4
"$@" &
# A node stays up without its daemon, as a real machine does. This shell reaps orphaned processes.
trap 'exit 0' TERM
while :; do sleep 3600 & wait $! || true; done
"""
