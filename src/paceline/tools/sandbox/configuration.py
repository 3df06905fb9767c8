"""Generate the text of a sandbox's configuration files."""

from __future__ import annotations

from paceline.tools.sandbox.settings import NAMESPACES, SandboxPaths, SandboxRecord


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
