"""Hand a request and the code that it needs over to a login node, and install Paceline there if it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.contract.files.foreign_records import parse_object
from paceline.contract.files.size import show_size
from paceline.errors import ConnectionProblem, EnvironmentProblem
from paceline.ssh.code_push.project_code import Parcel, describe_size, write_contents
from paceline.ssh.connection import Connection
from paceline.ssh.conversation import Conversation
from paceline.ssh.installation import Installation, install, recorded_installation
from paceline.ssh.remote.code_store import key_of
from paceline.ssh.request import ABSENT, SSH_FAILED, Request
from paceline.ssh.shell_text import SETUP_FAILED, explain_setup, read_setup_output

NOTED_SIZE = 5_000_000  # bytes: more than this is named before it is sent

Note = Callable[[str], None]


def deliver(
    connection: Connection,
    request: Request,
    parcel: Parcel,
    *,
    note: Note,
    heard: Note = lambda said: None,
) -> tuple[Installation, str]:
    """Hand a request over, and install Paceline if it is not there; return the name under which the request waits.

    `heard` is told what `setup` has printed.
    """
    installation = recorded_installation(connection)
    name = None
    if installation is not None:
        name = _deliver(connection, installation, request, parcel, note=note, heard=heard)
    if installation is None or name is None:
        installation = install(connection, note)
        name = _deliver(connection, installation, request, parcel, note=note, heard=heard)
    if name is None:
        raise ConnectionProblem(
            f"Paceline's files on {connection.cluster.name} disappeared right after the installation.",
            hint=f"Check that {installation.cache} is the same folder on every login node.",
        )
    return installation, name


def _deliver(
    connection: Connection,
    installation: Installation,
    request: Request,
    parcel: Parcel,
    *,
    note: Note,
    heard: Note,
) -> str | None:
    """Hand a request over; return the name under which it waits there, or None if Paceline is not there."""
    with Conversation(connection, installation.command("receive")) as talk:
        talk.send(f"{request.to_json()}\n".encode())
        answer = _read_answer(talk)
        if answer is not None and "missing" in answer:
            wanted = _read_wanted(answer["missing"], parcel)
            if wanted is None:
                raise connection.unclear()
            size, largest = describe_size(parcel, wanted)
            if size > NOTED_SIZE and not parcel.is_announced:
                note(f"sending {show_size(size)} of code to {connection.cluster.name}: {largest}")
            if wanted:
                try:
                    write_contents(parcel, wanted, talk.input)
                except ConnectionError:
                    pass  # the answer says why
            answer = _read_answer(talk)
        if answer is None:
            code = talk.close()
            if code == ABSENT:
                return None
            if code == SETUP_FAILED:
                raise explain_setup(talk.errors, name=connection.cluster.name)
            if code == SSH_FAILED and not connection.is_open():
                raise connection.lost("your command has not begun there")
            raise connection.failure(code, talk.errors)
        heard(read_setup_output(talk.errors))
    if "error" in answer:
        raise EnvironmentProblem(
            f"{connection.cluster.name} cannot take your code: {answer['error']}",
            hint=str(answer.get("hint", "")),
        )
    if not isinstance(answer.get("request"), str):
        raise connection.unclear()
    return str(answer["request"])


def _read_wanted(wanted: Any, parcel: Parcel) -> dict[str, str] | None:
    """Return the contents that the other side asks for; None if it asks for anything but the files of the parcel."""
    files = parcel.code.files
    if not isinstance(wanted, dict) or not all(
        isinstance(name, str) and name in files for name in wanted.values()
    ):
        return None
    return wanted if all(key == key_of(files[name]) for key, name in wanted.items()) else None


def _read_answer(talk: Conversation) -> dict[str, Any] | None:
    line = talk.read_line()
    try:
        return parse_object(line)
    except ValueError:
        return None
