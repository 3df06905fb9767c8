"""The warm process: a copy of a run's zygote that stays, and forks the zygotes of later runs.

It has imported torch and Paceline but none of the user's modules, has one thread, and never uses a
GPU. Each zygote that it forks belongs to the run that requested it, and ends with that run: if the
warm process is killed, runs in progress continue.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.agent.workers import process_tree
from paceline.agent.workers.warm.conditions import Conditions, difference
from paceline.agent.workers.warm.loaded_files import LoadedFiles
from paceline.agent.workers.warm.process_settings import IONICE, read_io_priority, take_settings
from paceline.agent.workers.warm.socket_folder import (
    NAME,
    SocketFolder,
    is_same_user,
    process_of,
    socket_name,
)
from paceline.agent.workers.zygote.imports import import_modules, shared_modules
from paceline.agent.workers.zygote.messages import ConnectionClosed, MessageSocket
from paceline.agent.workers.zygote.start import ZygoteOptions

RECEIVE_TIMEOUT = 5.0  # seconds for a client to send its request

_STAYS = "stays"

Later = tuple[MessageSocket, ZygoteOptions]  # the agent's end and the options of a run's zygote


def stay_warm(
    agent: MessageSocket, options: ZygoteOptions, conditions: Conditions, *, started: int
) -> Later | None:
    """Leave a warm process behind. Returns None in the calling zygote, and its run in each zygote
    of a later run.

    The agent gets a message that says whether the process stays.
    """
    files = LoadedFiles()
    why_not = _reason_not_to_stay(files, started)
    reader, writer = os.pipe()
    if not why_not and _is_copy():
        agent.end.detach()
        return _serve(writer, options, conditions, files)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    why_not = why_not or (answer or "it has ended" if answer != _STAYS else "")
    agent.send({"kind": "warm", "seconds": options.warm, "why_not": why_not})
    return None


def _reason_not_to_stay(files: LoadedFiles, started: int) -> str:
    if None in (sys.stdin, sys.stdout, sys.stderr):
        return "standard input or output is closed"  # later ranks would print nothing
    date, path = files.newest()
    if date <= started:
        return ""
    # Which version of it this process has is unknown.
    return f"{path} {'has a date in the future' if date > time.time_ns() else 'has just changed'}"


def _is_copy() -> bool:
    """Fork a process that is no descendant of the run, which ends all of them. Returns whether
    this is that process.
    """
    try:
        child = os.fork()
    except OSError:
        return False
    if child:
        os.waitpid(child, 0)
        return False
    try:
        grandchild = os.fork()
    except OSError:
        os._exit(1)
    if grandchild:
        os._exit(0)
    return True


def _serve(
    writer: int, options: ZygoteOptions, conditions: Conditions, files: LoadedFiles
) -> Later | None:
    """Serve later runs. Writes whether it can to a pipe first; returns only in a zygote of one of
    them.
    """
    later = None
    try:
        os.setsid()
        os.chdir("/")
        devices = {number: os.open(os.devnull, os.O_RDWR) for number in (0, 1, 2)}
        with open(_keep_descriptors(devices, writer), "w", encoding="utf-8") as pipe:
            try:
                sockets = SocketFolder.make()
                listening = sockets.listen(socket_name(sys.executable))
                pipe.write(_STAYS if listening is not None else "another process stays already")
            except OSError as error:
                pipe.write(str(error))
                raise
        if listening is not None:
            later = WarmProcess(
                sockets, *listening, options=options, conditions=conditions, files=files
            ).serve()
    except Exception:
        pass
    if later is None:
        os._exit(0)
    return later


class WarmProcess:
    """Serves requests until nobody has used it for a while, or a run needs another one."""

    def __init__(
        self,
        sockets: SocketFolder,
        listener: socket.socket,
        lock: int,
        *,
        options: ZygoteOptions,
        conditions: Conditions,
        files: LoadedFiles,
    ) -> None:
        self.sockets, self.listener, self.lock = sockets, listener, lock
        self.idle, self.threads = options.warm, options.threads
        self.conditions, self.files = conditions, files
        self.zygotes: set[int] = set()
        self.modules: list[str] = []  # that scripts need and this process lacks
        self.served = 0
        self.deadline = time.monotonic() + self.idle
        self.reader, self.writer = os.pipe()

    def serve(self) -> Later | None:
        """Serve until it is time to end. In a forked zygote, this returns its run."""
        process_tree.name_process(NAME)
        for end in (self.reader, self.writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            self._reap()
            left = None if self.zygotes else self.deadline - time.monotonic()
            is_unsafe = left is not None and self.modules and not self._import_missing()
            if is_unsafe or (left is not None and left <= 0):
                self._leave()
                return None
            select.select([self.listener.fileno(), self.reader], [], [], left)
            with suppress(BlockingIOError):
                os.read(self.reader, 4096)
            try:
                connection, _ = self.listener.accept()
            except OSError:
                continue
            client = MessageSocket(connection)
            try:
                if is_same_user(connection):
                    later = self._answer(client, *client.receive(RECEIVE_TIMEOUT))
                    if later is not None:
                        return later
            except (ConnectionClosed, TimeoutError):
                pass
            client.close()

    def _answer(
        self, client: MessageSocket, message: dict[str, Any], descriptors: list[int]
    ) -> Later | None:
        if message["kind"] == "start":
            return self._start(client, message, descriptors)
        client.send(self._status())
        if message["kind"] == "stop":
            self._leave()
            os._exit(0)
        return None

    def _start(
        self, client: MessageSocket, message: dict[str, Any], descriptors: list[int]
    ) -> Later | None:
        """Fork a zygote for a run, unless it needs another warm process: then end."""
        message["conditions"]["settings"][IONICE] = read_io_priority(process_of(client.end))
        changed = difference(self.conditions, message["conditions"]) or self.files.changed()
        if changed:
            self._leave()
            client.send({"kind": "refused", "why": changed})
            os._exit(0)
        options = ZygoteOptions.from_args(message["options"])
        self.idle, options.warm = options.warm, 0
        pid = os.fork()
        if pid == 0:
            try:
                self._become_zygote(client, message, descriptors)
                client.send({"kind": "accepted", "warm": os.getppid()})
            # its command is gone: it has the command's files, and must not serve others
            except BaseException:
                os._exit(1)
            return client, options
        self.zygotes.add(pid)
        self.served += 1
        for descriptor in descriptors:
            os.close(descriptor)
        needed = shared_modules(options, message["cwd"])
        self.modules += [
            name for name in needed if name not in sys.modules and name not in self.modules
        ]
        return None

    def _become_zygote(
        self, client: MessageSocket, message: dict[str, Any], descriptors: list[int]
    ) -> None:
        """Take over everything of the run that a child of its command would have inherited."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        folder = descriptors.pop()
        os.fchdir(folder)
        kept = _keep_descriptors(
            dict(zip(message["descriptors"], descriptors, strict=True)), client.end.detach()
        )
        client.end = socket.socket(fileno=kept)
        if not take_settings(message["conditions"]["settings"]):
            raise OSError("this process cannot have the settings of the command")
        os.environ.clear()
        os.environ.update(message["environ"])
        time.tzset()
        importlib.invalidate_caches()
        process_tree.name_process("paceline-zygote")

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self.zygotes.discard(pid)
                self.deadline = time.monotonic() + self.idle

    def _import_missing(self) -> bool:
        """Import what the last script needed, now that nobody waits for it. Returns whether
        forking is still safe.
        """
        started, names = time.time_ns(), self.modules
        self.modules = []
        problem = import_modules(
            [name for name in names if name not in sys.modules], threads=self.threads
        )
        self.files = LoadedFiles()
        return problem is None and self.files.newest()[0] <= started

    def _status(self) -> dict[str, Any]:
        return {
            "kind": "status",
            "pid": os.getpid(),
            "python": sys.executable,
            "memory": _memory(),
            "served": self.served,
            "running": len(self.zygotes),
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
            "idle": self.idle,
            "left": max(0.0, self.deadline - time.monotonic()),
        }

    def _leave(self) -> None:
        """Accept no more runs. Whoever waits for an answer starts a zygote of its own."""
        self.sockets.leave(socket_name(sys.executable))
        self.listener.close()
        os.close(self.lock)


def _keep_descriptors(wanted: Mapping[int, int], connection: int = -1) -> int:
    """Give each open file its wanted number, and close all others except the connection. Returns
    its new number.

    One spare number is enough: the limit may be low, and the wanted numbers high.
    """
    places = dict(wanted)  # where the file of each number is now
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (*places.values(), connection):
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    for number in wanted:
        if connection == number:
            connection = os.dup(number)
        for other, place in places.items():
            if other != number and place == number:
                places[other] = os.dup(number)
        if places[number] != number:
            os.dup2(places[number], number)
            os.close(places[number])
        os.set_inheritable(number, True)
        places[number] = number
    _renew_input()
    if connection >= 0:
        lowest = os.dup(connection)  # `select` takes no high number
        os.close(max(lowest, connection))
        connection = min(lowest, connection)
    return connection


def _renew_input() -> None:
    """Make `sys.stdin` as Python does at its start: what it knows of its file, such as its size,
    is no longer true.
    """
    old = sys.stdin
    new: Any = open(0, encoding=old.encoding, errors=old.errors, newline="\n", closefd=False)  # noqa: SIM115
    new.buffer.raw.name, new.mode = old.name, "r"
    sys.stdin = sys.__stdin__ = new  # type: ignore[misc]


def _memory() -> int:
    """Return the bytes of this process; pages that it shares with others count in part."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
