"""Warm starts: a copy of a run's zygote stays and forks the zygotes of the user's next runs.

It has imported torch and Paceline but none of the user's modules, has one thread, and never uses a
GPU. Each zygote that it forks belongs to the run that requested it, and ends with that run; if the
warm process is killed, runs in progress continue. It serves only runs that would have started their
own zygote in the same way, so another one replaces it if anything has changed.

`paceline run` imports this module before anything else: keep it light.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
import zlib

from paceline.agent.workers.zygote.messages import ConnectionClosed, MessageSocket
from paceline.agent.workers.zygote.start import ZygoteOptions
from paceline.contract import gpus
from paceline.contract.files import find_own_folder, make_own_folder
from paceline.contract.process import is_open

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
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
_LIMITS = 16  # Linux has as many, from 0 on

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
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        found["the control group"] = file.read()
    for name in os.listdir("/proc/self/ns"):
        found[f"the {name} namespace"] = os.readlink(f"/proc/self/ns/{name}")
    limits = [resource.getrlimit(number) for number in range(_LIMITS)]
    scheduling = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    return found | {
        "the interpreter": python,
        "the limits (ulimit)": str(limits),
        "the scheduling policy or nice": str(scheduling),
    }


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
) -> tuple[socket.socket | None, str]:
    """Return the socket of a zygote for a run in this folder; or None, and why the warm process
    cannot serve it.
    """
    path = _socket_path(python)
    connection = _connect(path) if path and all(map(is_open, (0, 1, 2))) else None
    if path is None or connection is None:
        return None, ""
    if any("/dev/fd/" in arg for arg in sys.argv):  # as in: train.py <(zcat data.gz)
        connection.close()
        return None, "an argument names an open file of your shell"
    message = {
        "kind": "start",
        "options": options.to_args(),
        "conditions": read_conditions(python, environ),
        "environ": environ,
    }
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    answer = _ask(connection, message, (0, 1, 2, folder))
    os.close(folder)
    if answer is not None and answer["kind"] == "accepted":
        connection.setblocking(True)
        return connection, ""
    connection.close()
    if answer is not None:
        return None, f"this has changed: {answer['why']}"
    os.unlink(path)  # another one takes its place
    return None, "the warm process is not responding"


def ask_all(kind: str, pids: Collection[int] | None = None) -> list[dict[str, Any]]:
    """Ask all warm processes of this user, or some, for their status; with "stop", they end."""
    folder = os.path.dirname(_socket_path(sys.executable) or "")
    names = sorted(os.listdir(folder)) if folder else []
    answers = []
    for path in (f"{folder}/{name}" for name in names if name.startswith(SOCKET)):
        answer = _ask_at(path, "status")
        if answer is not None and (pids is None or answer["pid"] in pids):
            answers.append(answer if kind == "status" else _ask_at(path, kind) or answer)
    return answers


def _ask_at(path: str, kind: str) -> dict[str, Any] | None:
    connection = _connect(path)
    if connection is None:
        return None
    with connection:
        return _ask(connection, {"kind": kind})


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


def _ask(
    connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()
) -> dict[str, Any] | None:
    warm = MessageSocket(connection)
    try:
        warm.send(message, descriptors, timeout=REPLY_TIMEOUT)
        return warm.receive(REPLY_TIMEOUT)[0]
    except (ConnectionClosed, OSError):
        return None


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
        self.served = 0
        self.deadline = time.monotonic() + idle

    def serve(self) -> Later:
        """Serve until it is time to end. In a forked zygote, this returns its run."""
        from paceline.agent.workers import process_tree

        process_tree.name_process(NAME)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
            self._reap()
        self._end()
        raise AssertionError("it has ended")

    def _answer(
        self, client: MessageSocket, message: dict[str, Any], descriptors: list[int]
    ) -> Later | None:
        if message["kind"] != "start":
            client.send(self._status())
            if message["kind"] == "stop":
                self._end()
            return None
        changed = difference(self.conditions, message["conditions"])
        changed = changed or difference(self.files, dict(_loaded_files(self.files)))
        if changed:
            os.unlink(self.path)  # before the answer: another one takes its place
            try:
                client.send({"kind": "refused", "why": changed})
            finally:  # also if its command is gone: nobody can reach this any more
                os._exit(0)
        options = ZygoteOptions.from_args(message["options"])
        self.idle, options.warm = options.warm, 0
        pid = os.fork()
        if not pid:
            try:
                self._become_zygote(message["environ"], descriptors)
                client.send({"kind": "accepted"})
            except BaseException:  # its command is gone; and this must not serve others
                os._exit(1)
            return client, options
        self.zygotes.add(pid)
        self.served += 1
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

    def _reap(self) -> None:
        while self.zygotes and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            self.zygotes.discard(pid)
            self.deadline = time.monotonic() + self.idle

    def _status(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        return {
            "kind": "status",
            "pid": os.getpid(),
            "python": sys.executable,
            "torch": str(getattr(torch, "__version__", "")),
            "served": self.served,
            "running": len(self.zygotes),
            "left": max(0.0, self.deadline - time.monotonic()),
        }

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
