"""Warm starts: a copy of a run's zygote stays and forks the zygotes of the user's next runs.

It has imported torch and Paceline but none of the user's modules, has one thread, and never uses a
GPU. Each zygote that it forks belongs to the run that requested it, and ends with that run; if the
warm process is killed, runs in progress continue. It serves only runs that would have started their
own zygote in the same way, so another one replaces it if anything has changed.

`paceline run` imports this module before anything else: keep it light.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import zlib

from paceline.agent.workers.zygote.start import ConnectionClosed, MessageSocket, ZygoteOptions
from paceline.contract import gpus
from paceline.contract.files import find_own_folder, make_own_folder
from paceline.contract.process import is_open

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

NAME = "paceline-warm"  # of a warm process
SOCKET = "warm-"  # the names of sockets, in a folder that only their user can enter
CONNECT_TIMEOUT = 1.0  # seconds
REPLY_TIMEOUT = 5.0
REAP_INTERVAL = 1.0

# Imports may depend on any variable: torch and what it imports read some 400. So all are compared,
# except those that shells and terminals set, and those that only ranks read.
IGNORED = {
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "STY"),
    *("DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "GPG_TTY", "LS_COLORS", "PS1"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "DBUS_SESSION_BUS_ADDRESS"),
    *gpus.NAMES,
}
IGNORED_PREFIXES = (
    "PACELINE_",
    "TERM_",
    "TMUX",
    "SSH_",
    "VSCODE_",
    "XDG_SESSION_",
    "HIST",
    "NCCL_",
    "GLOO_",
    "WANDB_",
    "HF_",
)
# Lines of /proc/self/status: what a fork cannot change.
_STATUS = (
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
    "CapEff",
    "CapBnd",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)

Conditions = dict[str, str]
Later = tuple[MessageSocket, ZygoteOptions]  # the agent's end and the options of a run's zygote


def reason_to_start_cold(environ: Mapping[str, str]) -> str | None:
    """Return why no process may stay here after a run; None if one may."""
    if sys.platform != "linux":
        return "it needs Linux"
    if environ.get("SLURM_JOB_ID"):
        return "this is a Slurm job"
    if environ.get("CI", "").lower() not in ("", "0", "false"):
        return "CI is set"
    return None


def read_conditions(python: str, environ: Mapping[str, str]) -> Conditions:
    """Return what this process gives to a zygote that it starts with these variables."""
    found = {
        name: value
        for name, value in environ.items()
        if name not in IGNORED and not name.startswith(IGNORED_PREFIXES)
    }
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    if not all(map(os.path.isabs, filter(None, entries))):
        found["the working directory, which PYTHONPATH depends on"] = os.getcwd()
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        fields = (line.partition(":") for line in file)
        found |= {name: value.strip() for name, _, value in fields if name in _STATUS}
    for name in os.listdir("/proc/self/ns"):
        found[f"the {name} namespace"] = os.readlink(f"/proc/self/ns/{name}")
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        found["the control group"] = file.read()
    with open("/proc/self/limits", encoding="utf-8") as file:
        found["the limits (ulimit)"] = file.read()
    found["nice"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["the interpreter"] = python
    return found


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the name of something that differs; None if nothing does."""
    names = sorted({*before, *now})
    return next((name for name in names if before.get(name) != now.get(name)), None)


def _socket_path(python: str, *, make: bool = False) -> str | None:
    """Return where the warm process of an interpreter listens; None without a folder of ours."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK)):
        base = "/dev/shm"
    folder = make_own_folder(base) if make else find_own_folder(base)
    return f"{folder}/{SOCKET}{zlib.crc32(os.fsencode(python)):08x}" if folder else None


# -- who asks
# --------------------------------------------------------------------------------------------


def request_zygote(
    python: str, options: ZygoteOptions, environ: dict[str, str]
) -> tuple[socket.socket | None, int, str]:
    """Return the socket and the process id of a zygote for a run in this folder; or None, 0, and
    why the warm process cannot serve it.
    """
    path = _socket_path(python)
    connection = _connect(path) if path and all(map(is_open, (0, 1, 2))) else None
    if path is None or connection is None:
        return None, 0, ""
    if any("/dev/fd/" in arg for arg in sys.argv):  # as in: train.py <(zcat data.gz)
        connection.close()
        return None, 0, "an argument names an open file of your shell"
    request = {
        "options": options.to_args(),
        "conditions": read_conditions(python, environ),
        "environ": environ,
    }
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    warm = MessageSocket(connection)
    try:
        warm.send(request, (0, 1, 2, folder), timeout=REPLY_TIMEOUT)
        answer, _ = warm.receive(REPLY_TIMEOUT)
    except (ConnectionClosed, TimeoutError):
        os.kill(_peer(connection), signal.SIGKILL)  # it holds our output, and another one starts
        os.unlink(path)
        answer = {"refused": "the warm process is not responding"}
    os.close(folder)
    if "refused" in answer:
        connection.close()
        return None, 0, answer["refused"]
    connection.setblocking(True)
    return connection, answer["pid"], ""


def find_processes() -> list[int]:
    """Return the warm processes of this user. One ends at a SIGTERM; the runs that it has started
    go on.
    """
    folder = os.path.dirname(_socket_path(sys.executable) or "")
    found = []
    for name in sorted(os.listdir(folder)) if folder else []:
        connection = _connect(f"{folder}/{name}") if name.startswith(SOCKET) else None
        if connection is not None:
            with connection:
                found.append(_peer(connection))
    return found


def _peer(connection: socket.socket) -> int:
    """Return the process id at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _connect(path: str) -> socket.socket | None:
    """Connect to a warm process; None if there is none. A socket that was left over is removed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_TIMEOUT)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            os.unlink(path)
        return None
    return connection


# -- the warm process
# ------------------------------------------------------------------------------------


def stay_warm(agent: MessageSocket, options: ZygoteOptions, conditions: Conditions) -> Later | None:
    """Leave a warm process behind, and tell the agent. Returns None in the calling zygote, and its
    run in each zygote of a later run.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = _socket_path(sys.executable, make=True)
        assert path is not None
        listener.bind(path)
        listener.listen()
        child = os.fork()
    except OSError:  # another one has just been left, or there is no room for one
        listener.close()
        return None
    if child:
        os.waitpid(child, 0)
        listener.close()
        agent.send({"kind": "warm", "seconds": options.warm})
        return None
    if os.fork():  # a process that is no descendant of the run, which ends all of those
        os._exit(0)
    os.setsid()
    os.chdir("/")
    listener.listen()  # so that its clients see this process at the other end
    agent.end.detach()  # it is closed with all others, whatever gets its number later
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != listener.fileno() and is_open(number):
            os.close(number)
    return _WarmProcess(listener, path, options.warm, conditions).serve()


class _WarmProcess:
    """Serves requests until nobody has used it for a while, or a run needs another one."""

    def __init__(
        self, listener: socket.socket, path: str, idle: float, conditions: Conditions
    ) -> None:
        self.listener, self.path, self.idle, self.conditions = listener, path, idle, conditions
        self.files = dict(_loaded_files())
        self.zygotes: set[int] = set()
        self.deadline = time.monotonic() + idle

    def serve(self) -> Later:
        """Serve until it is time to end. In a forked zygote, this returns its run."""
        from paceline.agent.workers import process_tree

        process_tree.name_process(NAME)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        while self.zygotes or time.monotonic() < self.deadline:
            if select.select([self.listener], [], [], REAP_INTERVAL)[0]:
                client = MessageSocket(self.listener.accept()[0])
                try:
                    later = self._answer(client, *client.receive(REPLY_TIMEOUT))
                    if later is not None:
                        return later
                except (ConnectionClosed, TimeoutError):
                    pass
                client.close()
            while self.zygotes and (pid := os.waitpid(-1, os.WNOHANG)[0]):
                self.zygotes.discard(pid)
                self.deadline = time.monotonic() + self.idle
        self._end()
        raise AssertionError("it has ended")

    def _answer(
        self, client: MessageSocket, request: dict[str, Any], descriptors: list[int]
    ) -> Later | None:
        changed = difference(self.conditions, request["conditions"])
        changed = changed or difference(self.files, dict(_loaded_files(self.files)))
        if changed:
            os.unlink(self.path)  # before the answer: another one takes its place
            try:
                client.send({"refused": f"this has changed: {changed}"})
            finally:  # also if its command is gone: nobody can reach this any more
                os._exit(0)
        options = ZygoteOptions.from_args(request["options"])
        self.idle, options.warm = options.warm, 0
        pid = os.fork()
        if not pid:
            try:
                self._become_zygote(request["environ"], descriptors)
                client.send({"pid": os.getpid()})
            except BaseException:  # its command is gone; and this must not serve others
                os._exit(1)
            return client, options
        self.zygotes.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _become_zygote(self, environ: dict[str, str], descriptors: list[int]) -> None:
        """Take over what a child of the command would have inherited."""
        self.listener.close()
        os.setsid()
        *streams, folder = descriptors
        os.fchdir(folder)
        os.close(folder)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environ)
        time.tzset()

    def _end(self) -> None:
        os.unlink(self.path)
        os._exit(0)


def _loaded_files(paths: Collection[str] = ()) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield the state of each file that this process has loaded, and of the folders of installed
    packages: if one changes, its modules are out of date.
    """
    if not paths:
        import site

        modules = (getattr(each, "__file__", None) for each in list(sys.modules.values()))
        packages = [*site.getsitepackages(), site.getusersitepackages()]
        paths = {each for each in (*modules, *packages) if each} | {f"{sys.prefix}/pyvenv.cfg"}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            yield path, None
        else:
            yield path, (status.st_mtime_ns, status.st_size)
