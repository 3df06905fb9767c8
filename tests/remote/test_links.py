"""Slow, silent and broken links to a real sshd: every command ends, says what is known, and can be repeated."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from paceline.errors import ConnectionProblem
from paceline.spec.clusters import Cluster
from paceline.ssh import connection as connections
from paceline.ssh.connection import Connection
from paceline.ssh.conversation import Conversation
from paceline.ssh.remote import unpack
from tests.remote.lab import Lab
from tests.remote.relay import Relay

Laptop = Callable[..., subprocess.CompletedProcess[str]]
# by default it is a minute, too long for a test
IMPATIENT = ("ServerAliveInterval 1", "ServerAliveCountMax 2")


def test_a_link_of_200_ms(lab: Lab, laptop: Laptop, link: Relay) -> None:
    link.delay = 0.1
    laptop("login", "link", check=True)
    assert json.loads(laptop("ps", "--on", "link", "--json", check=True).stdout)["runs"] == []
    assert link.connections == 1
    laptop("logout", check=True)
    lab.wait_until_empty()


# -- silence -----------------------------------------------------------------------------------------------------


def test_a_connection_of_ours_asks_for_signs_of_life(lab: Lab, laptop: Laptop, link: Relay) -> None:
    """So that no command hangs for longer than a minute, whatever the user's configuration says."""
    laptop("login", "link", check=True)
    (master,) = masters(lab)
    assert "ServerAliveInterval=15 -o ServerAliveCountMax=4" in " ".join(master.cmdline())


def masters(lab: Lab) -> list[psutil.Process]:
    """Return the processes that keep the laptop's connections open."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            argv = process.cmdline()
            if "-M" in argv and str(lab.config) in argv:
                found.append(process)
    return found


@pytest.mark.parametrize("phase", [pytest.param("before", marks=pytest.mark.slow), "installation"])
def test_a_command_over_a_silent_link_ends(
    lab: Lab, laptop: Laptop, link: Relay, phase: str
) -> None:
    lab.configure(*IMPATIENT)
    laptop("login", "link", check=True)
    cache = lab.uninstall()
    if phase == "before":
        link.stall()
    else:
        link.stall_after(500_000)
    done = laptop("ps", "--on", "link")
    assert done.returncode == 1
    assert "connection to link was lost" in done.stderr or "not logged in to link" in done.stderr, (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "not logged in to link" in laptop("ps", "--on", "link").stderr
    link.cut()  # the login node notices at last
    lab.wait_until_empty()
    link.restore()
    laptop("login", "link", check=True)
    laptop("ps", "--on", "link", check=True)
    (installed,) = [path for path in cache.iterdir() if path.name[0].isdigit()]
    assert (installed / unpack.COMPLETE).exists()
    assert not list(cache.glob(".partial-*"))


@pytest.fixture
def shared(lab: Lab, link: Relay) -> Iterator[Connection]:
    """A connection that the user has opened, in whose configuration nothing notices silence."""
    lab.configure("ControlMaster auto", f"ControlPath {lab.folder}/shared-%C", "ControlPersist 5m")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab.variables.items():
            patch.setenv(name, value)
        patch.setattr(connections, "PROBE_PAUSE", 1.0)
        subprocess.run([str(lab.bin / "ssh"), "-fN", "link"], check=True, stdin=subprocess.DEVNULL)
        yield Connection(Cluster("link", "link"))
        subprocess.run(
            [str(lab.bin / "ssh"), "-O", "exit", "link"], check=True, capture_output=True
        )


def test_a_connection_of_the_users_that_notices_nothing(shared: Connection, link: Relay) -> None:
    assert shared.socket.is_users

    def talk() -> None:
        with Conversation(shared, "cat") as talk:
            talk.send(b"hello\n")
            assert talk.read_line() == b"hello\n"
            link.stall()
            assert talk.read_line() == b""

    with pytest.raises(ConnectionProblem, match="link did not respond within 1 s"):
        talk()
    with pytest.raises(ConnectionProblem, match="link did not respond within 2 s"):
        shared.call("true", timeout=2)
    with pytest.raises(ConnectionProblem, match="did not respond"), Conversation(shared, "cat"):
        pass
