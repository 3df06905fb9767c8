"""Ask a warm process for the zygote of a run, for its status, or to end."""

from __future__ import annotations

import os
import resource
import signal

from paceline.agent.workers.warm.conditions import read_conditions
from paceline.agent.workers.warm.socket_folder import NAME, SocketFolder, process_of, socket_name
from paceline.agent.workers.zygote.messages import ConnectionClosed, MessageSocket
from paceline.agent.workers.zygote.start import ZygoteOptions
from paceline.contract.process import is_open

TYPE_CHECKING = False  # `paceline run` asks before it has imported anything
if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence
    from typing import Any

CONNECT_TIMEOUT = 1.0
REPLY_TIMEOUT = 5.0  # seconds; it may just import something else


def request_zygote(
    python: str, options: ZygoteOptions, environ: dict[str, str]
) -> tuple[socket.socket | None, str]:
    """Return the socket of a zygote for a run in this folder; or None, and why the warm process
    cannot serve it.

    One that does not answer is killed, so that the run can leave another.
    """
    sockets = SocketFolder.find()
    if sockets is None or not all(map(is_open, (0, 1, 2))):
        return None, ""
    connection = sockets.connect(socket_name(python), CONNECT_TIMEOUT)
    sockets.close()
    if connection is None:
        return None, ""
    inherited = [number for number in _descriptors() if number < 3 or os.get_inheritable(number)]
    if inherited[-1] >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        connection.close()
        return None, f"file descriptor {inherited[-1]} is open, but `ulimit -n` no longer allows it"
    message = {
        "kind": "start",
        "options": options.to_args(),
        "conditions": read_conditions(python, environ),
        "environ": environ,
        "cwd": os.getcwd(),
        "descriptors": inherited,
    }
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    answer = _ask(connection, message, [*inherited, folder])
    os.close(folder)
    if answer is not None and answer["kind"] == "accepted":
        connection.setblocking(True)
        return connection, ""
    if answer is None:
        kill(process_of(connection))
    connection.close()
    return (
        None,
        "the warm process is not responding"
        if answer is None
        else f"this has changed: {answer['why']}",
    )


def _ask(
    connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Return the answer of a warm process; None if it is stopped, hangs or has just ended."""
    if _is_stopped(process_of(connection)):
        return None
    warm = MessageSocket(connection)
    try:
        warm.send(message, descriptors, timeout=REPLY_TIMEOUT)
        return warm.receive(REPLY_TIMEOUT)[0]
    except (ConnectionClosed, OSError):
        return None


def kill(pid: int) -> bool:
    """End a warm process that does not answer. Running runs go on. Returns False if it has ended
    already.
    """
    from paceline.agent.workers import process_tree

    if not _is_warm(pid):
        return False
    process_tree.send_signal(pid, signal.SIGKILL)
    process_tree.await_end(pid, CONNECT_TIMEOUT)  # until then, it has the lock of its name
    return True


def _is_warm(pid: int) -> bool:
    """Whether this is a warm process, and not another one that has got its number."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return (
                file.read().strip() == NAME.encode()
                and os.fstat(file.fileno()).st_uid == os.geteuid()
            )
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    """Whether somebody has suspended a process, as Ctrl-Z does."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def ask_all(kind: str, pids: Collection[int] | None = None) -> list[dict[str, Any]]:
    """Ask all warm processes of this user, or some, for their status; with "stop", they end.

    Of one that does not answer, only the process is known.
    """
    sockets = SocketFolder.find()
    if sockets is None:
        return []
    answers = []
    for name in sockets.names():
        connection = sockets.connect(name, CONNECT_TIMEOUT)
        if connection is None:
            continue
        pid = process_of(connection)
        if pids is not None and pid not in pids:
            connection.close()
            continue
        answer = _ask(connection, {"kind": kind})
        connection.close()
        if answer is None and (kill(pid) if kind == "stop" else _is_warm(pid)):
            answer = {"kind": "silent", "pid": pid}
        if answer is not None:
            answers.append(answer)
    sockets.close()
    return answers


def _descriptors() -> list[int]:
    """Return the descriptors that are open, without that of the listing itself."""
    return [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(number)]
