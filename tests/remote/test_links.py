"""Slow, silent and broken links to a real sshd: every command ends, says what is known, and can be repeated."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

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
    laptop("login", "--close", check=True)
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


@pytest.mark.slow  # test_traces.py cuts a link while code is sent
@pytest.mark.parametrize("phase", ["before", "installation"])
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
    assert "not logged in to link" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "not logged in to link" in laptop("ps", "--on", "link").stderr
    link.cut()  # the login node notices at last
    lab.wait_until_empty()
    link.restore()
    laptop("login", "link", check=True)
    laptop("ps", "--on", "link", check=True)
    assert len(list(cache.glob("*/complete"))) == 1
