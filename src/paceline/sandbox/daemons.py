"""Starting the daemons of a sandbox, one function each. All run in the foreground, so that their pids are known."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.sandbox import configuration, network
from paceline.sandbox.packages import program, search_path
from paceline.sandbox.processes import Process, start
from paceline.sandbox.settings import NAMESPACES, Record, SandboxPaths

PATIENCE = 60.0  # seconds for a daemon to answer, on a machine that is busy with other things


def user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def environment(paths: SandboxPaths) -> dict[str, str]:
    """Daemons see nothing of the shell that starts them."""
    return {
        "PATH": search_path(),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(paths.slurm_conf),
        "MYSQL_UNIX_PORT": str(paths.database_socket),
    }


def write_files(paths: SandboxPaths, record: Record) -> None:
    """Folders, configuration, the munge key and the fake GPUs."""
    for folder in (*paths.created, paths.log("any").parent):
        folder.mkdir(parents=True, exist_ok=True)
    for node in record.settings.names:
        paths.node_tmp(node).mkdir(parents=True, exist_ok=True)
        (paths.folder / "spool" / node).mkdir(exist_ok=True)
    me = user()
    paths.slurm_conf.write_text(configuration.slurm_conf(paths, record, user=me))
    (paths.etc / "gres.conf").write_text(configuration.gres_conf(paths, record))
    (paths.etc / "cgroup.conf").write_text(configuration.cgroup_conf())
    for index in range(record.settings.gpus):
        # Slurm wants a character device: a link to one passes, and nobody needs to be root for it.
        device = paths.devices / f"nvidia{index}"
        device.unlink(missing_ok=True)
        device.symlink_to("/dev/null")
    paths.munge_key.unlink(missing_ok=True)
    _write_secret(paths.munge_key, os.urandom(128))
    if record.settings.network == NAMESPACES:
        paths.hosts.write_text(configuration.hosts(record, machine=socket.gethostname()))
        paths.init.write_text(configuration.NODE_INIT)
    if record.settings.accounting:
        _write_secret(
            paths.etc / "slurmdbd.conf", configuration.slurmdbd_conf(paths, record, user=me).encode()
        )
        (paths.etc / "mariadb.cnf").write_text(configuration.database_conf(paths, user=me))


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def start_munged(paths: SandboxPaths, record: Record) -> None:
    argv = [
        program("munged"), "--foreground",
        "--force",  # it would refuse a folder below one that others may not enter
        f"--key-file={paths.munge_key}", f"--socket={paths.munge_socket}",
        f"--pid-file={paths.run / 'munged.pid'}", f"--log-file={paths.log('munged')}",
        f"--seed-file={paths.run / 'munged.seed'}", "--num-threads=4",
    ]  # fmt: skip
    process = _start(paths, record, "munged", argv)
    _await("munged", process, paths, paths.munge_socket.exists)


def start_controller(paths: SandboxPaths, record: Record) -> None:
    # -i: a sandbox that lost a state file is to come up without it.
    argv = [program("slurmctld"), "-D", "-i", "-f", str(paths.slurm_conf)]
    process = _start(paths, record, "slurmctld", argv)
    port = record.ports["slurmctld"]
    _await("slurmctld", process, paths, lambda: _answers(port))


def start_node(paths: SandboxPaths, record: Record, node: str) -> None:
    """The node's daemon, in its own namespaces if it has some. It registers with the controller by itself."""
    daemon = [program("slurmd"), "-D", "-N", node, "-f", str(paths.slurm_conf)]
    if record.settings.network != NAMESPACES:
        _start(paths, record, node, daemon, log=f"slurmd-{node}")
        return
    # Later mounts of this machine appear in the nodes (slave); theirs stay their own.
    argv = [
        program("unshare"), "--net", "--uts", "--ipc", "--pid", "--mount", "--propagation=slave",
        "--fork", "--kill-child", "--mount-proc", program("bash"), str(paths.init),
        node, record.address(node), str(paths.hosts), str(record.settings.memory), *daemon,
    ]  # fmt: skip
    outer = _start(paths, record, node, argv)
    init = network.namespaces_of(outer)
    if init is None:
        raise _ended(node, paths)
    network.plug_in(record, node, init)


def start_accounting(paths: SandboxPaths, record: Record) -> None:
    """MariaDB on a socket of its own, then the daemon that keeps Slurm's books in it."""
    where = paths.database / "data"
    if not where.exists():
        made = subprocess.run(
            [
                program("mariadb-install-db"), "--no-defaults", f"--user={user()}", f"--datadir={where}",
                "--auth-root-authentication-method=normal", "--skip-test-db",
            ],
            env=environment(paths), text=True, capture_output=True,
        )  # fmt: skip
        if made.returncode:
            raise EnvironmentProblem(f"mariadb-install-db failed:\n{tail_of_text(made.stdout + made.stderr)}")
    argv = [program("mariadbd"), f"--defaults-file={paths.etc / 'mariadb.cnf'}"]
    process = _start(paths, record, "mariadbd", argv)
    _await("mariadbd", process, paths, lambda: _sql(paths, "select 1"))
    made_database = _sql(
        paths,
        "create database if not exists slurm_acct_db;"
        "create user if not exists slurm@localhost identified by 'slurm';"
        "grant all on slurm_acct_db.* to slurm@localhost;",
    )
    if not made_database:
        raise EnvironmentProblem(f"the database refused its user:\n{tail(paths.log('mariadbd'))}")
    process = _start(paths, record, "slurmdbd", [program("slurmdbd"), "-D"])
    _await("slurmdbd", process, paths, lambda: _answers(record.ports["slurmdbd"]))


def _sql(paths: SandboxPaths, statements: str) -> bool:
    words = ["--no-defaults", f"--socket={paths.database_socket}", "--user=root", "--execute", statements]
    done = subprocess.run([program("mariadb"), *words], env=environment(paths), capture_output=True)
    return done.returncode == 0


def listens(record: Record, node: str) -> bool:
    """Whether a node's daemon takes connections."""
    return _answers(record.ports[node], host=record.address(node))


def _answers(port: int, *, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _start(paths: SandboxPaths, record: Record, name: str, argv: list[str], *, log: str = "") -> Process:
    process = start(argv, log=_output(paths, log or name), environment=environment(paths))
    if process is None:
        raise _ended(name, paths)
    record.processes[name] = process
    record.save(paths)  # at once: what is written down can be taken down
    return process


def _await(name: str, process: Process, paths: SandboxPaths, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not answers():
        if not process.alive():
            raise _ended(name, paths)
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"{name} did not answer within {PATIENCE:.0f} s; it says:\n{log_tail(name, paths)}"
            )
        time.sleep(0.02)


def _ended(name: str, paths: SandboxPaths) -> EnvironmentProblem:
    return EnvironmentProblem(f"{name} ended as soon as it was started; it says:\n{log_tail(name, paths)}")


def _output(paths: SandboxPaths, name: str) -> Path:
    """What a daemon prints before it has opened its log."""
    return paths.log(name).with_suffix(".out")


def log_tail(name: str, paths: SandboxPaths) -> str:
    """The end of what a daemon or a node had to say."""
    name = f"slurmd-{name}" if name.startswith("node") and paths.log(f"slurmd-{name}").exists() else name
    return tail(paths.log(name)) or tail(_output(paths, name)) or f"(nothing, in {paths.log(name)})"


def tail(path: Path, lines: int = 8) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return tail_of_text(text, lines)


def tail_of_text(text: str, lines: int = 8) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-lines:])
