"""Ask a warm process for the zygote of a run, for its status, or to end."""

from __future__ import annotations

import os

from paceline.agent.workers.warm.conditions import read_conditions
from paceline.agent.workers.warm.place import Place, socket_name
from paceline.agent.workers.zygote.messages import ConnectionClosed, MessageSocket
from paceline.agent.workers.zygote.start import ZygoteOptions
from paceline.contract.process import is_open

TYPE_CHECKING = False  # `paceline run` asks before it has imported anything
if TYPE_CHECKING:
    import socket
    from typing import Any

CONNECT_TIMEOUT = 1.0
REPLY_TIMEOUT = 10.0  # seconds; it may just import something else


def request_zygote(python: str, options: ZygoteOptions, environ: dict[str, str]) -> tuple[socket.socket | None, str]:
    """Return the socket of a zygote for a run in this folder; or None, and why the warm process did not fit."""
    place = Place.find()
    if place is None or not all(map(is_open, (0, 1, 2))):
        return None, ""
    connection = place.connect(socket_name(python), CONNECT_TIMEOUT)
    place.close()
    if connection is None:
        return None, ""
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    inherited = [number for number in _descriptors() if number < 3 or os.get_inheritable(number)]
    warm = MessageSocket(connection)
    try:
        warm.send({
            "kind": "start", "options": options.to_args(), "conditions": read_conditions(python, environ),
            "environ": environ, "cwd": os.getcwd(), "descriptors": inherited,
        }, [*inherited, folder])  # fmt: skip
        answer, _ = warm.receive(REPLY_TIMEOUT)
    except (ConnectionClosed, OSError):
        warm.close()
        return None, "it does not answer"
    finally:
        os.close(folder)
    if answer["kind"] != "accepted":
        warm.close()
        return None, str(answer["why"])
    connection.setblocking(True)
    return connection, ""


def ask_all(kind: str) -> list[dict[str, Any]]:
    """Ask all warm processes of this user for their status; with "stop", they end."""
    place = Place.find()
    if place is None:
        return []
    answers = []
    for name in place.names():
        connection = place.connect(name, CONNECT_TIMEOUT)
        if connection is None:
            continue
        warm = MessageSocket(connection)
        try:
            warm.send({"kind": kind})
            answers.append(warm.receive(REPLY_TIMEOUT)[0])
        except (ConnectionClosed, OSError):
            continue  # it has just ended
        finally:
            warm.close()
    place.close()
    return answers


def _descriptors() -> list[int]:
    """Return the descriptors that are open, without that of the listing itself."""
    return [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(number)]
