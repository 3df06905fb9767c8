"""Start the daemons of a sandbox, all in the foreground, so that their pids are known; and the
database of its accounting: not run by root, in a folder that only its user can enter.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox import network
from paceline.tools.sandbox.packages import program, search_path
from paceline.tools.sandbox.processes import Process, start
from paceline.tools.sandbox.settings import (
    NAMESPACES,
    NODE_INIT,
    SandboxPaths,
    SandboxRecord,
    cgroup_conf,
    database_conf,
    gres_conf,
    hosts,
    slurm_conf,
    slurmdbd_conf,
)
from paceline.watch.scheduler import SANDBOX_FILE

POLL_INTERVAL = 0.5  # seconds; you share this Slurm with nobody
START_TIMEOUT = 60.0  # seconds for a daemon to respond, even on a busy machine


def user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def environment(paths: SandboxPaths, record: SandboxRecord) -> dict[str, str]:
    """Return the environment of the daemons, which inherits nothing else from the shell that
    starts them.
    """
    return {
        "PATH": search_path(),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(paths.slurm_conf),
        "MYSQL_UNIX_PORT": record.database_socket,
    }


def write_files(paths: SandboxPaths, record: SandboxRecord) -> None:
    """Create the folders, configuration files, munge key and fake GPUs.

    Others must not enter: whoever reaches munge's socket can run jobs here as this user.
    """
    for folder in (*paths.created, paths.log("any").parent):
        make_private(folder)
    for node in record.settings.names:
        paths.node_tmp(node).mkdir(parents=True, exist_ok=True)
        (paths.path / "spool" / node).mkdir(exist_ok=True)
    owner = user()
    paths.slurm_conf.write_text(slurm_conf(paths, record, user=owner))
    paths.slurm_conf.with_name(SANDBOX_FILE).write_text(f"{POLL_INTERVAL}\n")
    (paths.etc / "gres.conf").write_text(gres_conf(paths, record))
    (paths.etc / "cgroup.conf").write_text(cgroup_conf())
    for index in range(record.settings.gpus):
        # Slurm expects a character device. A link to one is enough, and does not need root to
        # create.
        device = paths.devices / f"nvidia{index}"
        device.unlink(missing_ok=True)
        device.symlink_to("/dev/null")
    paths.munge_key.unlink(missing_ok=True)
    _write_secret(paths.munge_key, os.urandom(128))
    if record.settings.network == NAMESPACES:
        paths.hosts.write_text(hosts(record, machine=socket.gethostname()))
        paths.init.write_text(NODE_INIT)


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises EnvironmentProblem if somebody else has
    made it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise EnvironmentProblem(
            f"{folder} is not your own folder.", hint="Choose another path with --dir."
        )
    folder.chmod(0o700)


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def start_munged(paths: SandboxPaths, record: SandboxRecord) -> None:
    argv = [
        program("munged"),
        "--foreground",
        "--force",  # otherwise munged rejects a folder whose parents others cannot enter
        f"--key-file={paths.munge_key}",
        f"--socket={paths.munge_socket}",
        f"--pid-file={paths.run / 'munged.pid'}",
        f"--log-file={paths.log('munged')}",
        f"--seed-file={paths.run / 'munged.seed'}",
        "--num-threads=4",
    ]
    process = _start(paths, record, "munged", argv)
    _wait_until("munged", process, paths, paths.munge_socket.exists)


def start_controller(paths: SandboxPaths, record: SandboxRecord) -> None:
    # -i: start even if a state file is missing.
    argv = [program("slurmctld"), "-D", "-i", "-f", str(paths.slurm_conf)]
    process = _start(paths, record, "slurmctld", argv)
    port = record.ports["slurmctld"]
    _wait_until("slurmctld", process, paths, lambda: accepts(port))


def start_node(paths: SandboxPaths, record: SandboxRecord, node: str) -> None:
    """Start a node's daemon, in its own namespaces if configured. It registers itself with the
    controller.
    """
    daemon = [program("slurmd"), "-D", "-N", node, "-f", str(paths.slurm_conf)]
    if record.settings.network != NAMESPACES:
        _start(paths, record, node, daemon, log=f"slurmd-{node}")
        return
    # Propagation "slave": this machine's later mounts appear in the nodes, but not the reverse.
    argv = [
        program("unshare"),
        "--net",
        "--uts",
        "--ipc",
        "--pid",
        "--mount",
        "--propagation=slave",
        "--fork",
        "--kill-child",
        "--mount-proc",
        program("bash"),
        str(paths.init),
        node,
        record.address(node),
        str(paths.hosts),
        str(record.settings.memory),
        *daemon,
    ]
    outer = _start(paths, record, node, argv)
    init = network.find_init(outer)
    if init is None:
        raise _exited(node, paths)
    network.connect(record, node, init)


def start_accounting(paths: SandboxPaths, record: SandboxRecord) -> None:
    """Start MariaDB on its own socket, then slurmdbd, which stores Slurm's accounting in it."""
    variables = environment(paths, record)
    install_database(record, owner=user(), environment=variables)
    process = _start(
        paths, record, "mariadbd", [program("mariadbd"), f"--defaults-file={_settings(record)}"]
    )
    ready = partial(_run_statements, record, "select 1", variables)
    _wait_until("mariadbd", process, paths, ready)
    password = secrets.token_hex(16)
    accounts = (
        "create database slurm_acct_db;"
        f"create user slurm@localhost identified by '{password}';"
        "grant all on slurm_acct_db.* to slurm@localhost;"
    )
    if not _run_statements(record, accounts, variables):
        raise EnvironmentProblem(
            f"Cannot create the accounting database:\n{tail(paths.log('mariadbd'))}"
        )
    text = slurmdbd_conf(paths, record, user=user(), password=password)
    _write_secret(paths.etc / "slurmdbd.conf", text.encode())
    process = _start(paths, record, "slurmdbd", [program("slurmdbd"), "-D"])
    _wait_until("slurmdbd", process, paths, lambda: accepts(record.ports["slurmdbd"]))


def accepts(port: int, *, host: str = "127.0.0.1") -> bool:
    """Return whether a daemon accepts connections."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _start(
    paths: SandboxPaths, record: SandboxRecord, name: str, argv: list[str], *, log: str = ""
) -> Process:
    process = start(argv, log=_output(paths, log or name), environment=environment(paths, record))
    if process is None:
        raise _exited(name, paths)
    record.processes[name] = process
    record.save(paths)  # at once, so that the process can be stopped whatever happens next
    return process


def _wait_until(
    name: str, process: Process, paths: SandboxPaths, ready: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not ready():
        if not process.alive():
            raise _exited(name, paths)
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"{name} did not respond within {START_TIMEOUT:.0f} s. Its log ends "
                f"with:\n{log_tail(name, paths)}"
            )
        time.sleep(0.02)


def _exited(name: str, paths: SandboxPaths) -> EnvironmentProblem:
    return EnvironmentProblem(f"{name} exited at once. Its log ends with:\n{log_tail(name, paths)}")


def _output(paths: SandboxPaths, name: str) -> Path:
    """Return the file for what a daemon prints before it opens its log."""
    return paths.log(name).with_suffix(".out")


def log_tail(name: str, paths: SandboxPaths) -> str:
    """Return the end of a daemon's or a node's log."""
    name = (
        f"slurmd-{name}"
        if name.startswith("node") and paths.log(f"slurmd-{name}").exists()
        else name
    )
    return tail(paths.log(name)) or tail(_output(paths, name)) or f"  ({paths.log(name)} is empty)"


def tail(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return last_lines(text)


def last_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-8:])


SERVER_USERS = ("mysql", "mariadb", "nobody")  # for root: the first of them that exists


def make_database_folder() -> str:
    """Make the folder of a new database. It may not lie in the sandbox's: root's is closed to the
    server's user.
    """
    folder = tempfile.mkdtemp(prefix="paceline-database-")
    server = _server_user()
    os.chown(folder, server.pw_uid, server.pw_gid)
    return folder


def install_database(record: SandboxRecord, *, owner: str, environment: dict[str, str]) -> None:
    """Write the server's settings and its own tables. Its administrator is `owner`, known by their
    Unix account.
    """
    server = _server_user()
    settings = _settings(record)
    settings.write_text(database_conf(record, user=server.pw_name))
    os.chown(settings, server.pw_uid, server.pw_gid)
    made = subprocess.run(
        [
            program("mariadb-install-db"),
            f"--defaults-file={settings}",
            "--skip-test-db",
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={owner}",
        ],
        env=environment,
        text=True,
        capture_output=True,
    )
    if made.returncode:
        output = last_lines(made.stdout + made.stderr)
        raise EnvironmentProblem(f"mariadb-install-db failed:\n{output}")


def _run_statements(record: SandboxRecord, statements: str, environment: dict[str, str]) -> bool:
    """Run statements, and return whether they succeeded. They may hold a password, so they are not
    arguments.
    """
    options = ["--no-defaults", f"--socket={record.database_socket}", f"--user={user()}"]
    done = subprocess.run(
        [program("mariadb"), *options],
        input=statements.encode(),
        env=environment,
        capture_output=True,
    )
    return done.returncode == 0


def _settings(record: SandboxRecord) -> Path:
    return Path(record.database) / "mariadb.cnf"


def _server_user() -> pwd.struct_passwd:
    """Return the account that the server runs as: your own, or one without privileges if you are
    root.
    """
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in SERVER_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EnvironmentProblem(
        "The accounting database must not run as root, and no other account is available.",
        hint="Create an account called mysql.",
    )
