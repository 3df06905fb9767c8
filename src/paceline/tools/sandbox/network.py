"""The network of nodes in namespaces: a bridge on this machine, and a virtual cable (veth pair) to
each node.
"""

from __future__ import annotations

import subprocess
import time

from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox.packages import program
from paceline.tools.sandbox.processes import Process
from paceline.tools.sandbox.settings import SandboxRecord

IP_TIMEOUT = 60.0  # seconds; the kernel may still be removing the network of dead nodes


def ip(*args: str, check: bool = True) -> str:
    """Run the `ip` command and return its output."""
    try:
        done = subprocess.run(
            [program("ip"), *args], text=True, capture_output=True, timeout=IP_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(
            f"`ip {' '.join(args)}` did not finish within {IP_TIMEOUT:.0f} s.",
            hint="The kernel's log may say why: `dmesg`.",
        ) from None
    if check and done.returncode:
        raise EnvironmentProblem(
            f"`ip {' '.join(args)}` failed: {done.stderr.strip()}.",
            hint="Namespaces need root with CAP_NET_ADMIN. Without it, use --network plain.",
        )
    return done.stdout


def create_bridge(record: SandboxRecord) -> None:
    ip("link", "add", record.bridge, "type", "bridge")
    ip("address", "add", f"{record.controller_address}/24", "dev", record.bridge)
    ip("link", "set", record.bridge, "up")


def remove(record: SandboxRecord) -> None:
    """Remove the bridge, and the cables that a failed start left behind."""
    if record.bridge:
        for node in record.settings.names:
            ip("link", "delete", record.cable(node), check=False)
        ip("link", "delete", record.bridge, check=False)


def connect(record: SandboxRecord, node: str, init: Process) -> None:
    """Connect a node to the bridge with a new cable, which disappears with the node's namespace."""
    cable = record.cable(node)
    ip("link", "delete", cable, check=False)  # the kernel removes a dead node's cable with a delay
    ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
    ip("link", "set", cable, "master", record.bridge, "up")


def set_cable(record: SandboxRecord, node: str, *, connected: bool) -> None:
    ip("link", "set", record.cable(node), "up" if connected else "down")


def is_cut(record: SandboxRecord, node: str) -> bool:
    """Return whether the cable exists but is switched off."""
    link = ip("-o", "link", "show", record.cable(node), check=False)
    flags = link.partition("<")[2].partition(">")[0].split(",")
    return bool(link) and "UP" not in flags


def find_init(outer: Process, *, timeout: float = 30.0) -> Process | None:
    """Return a node's process 1 as this machine sees it: the child of `unshare` inside the new
    namespaces.
    """
    deadline = time.monotonic() + timeout
    while outer.alive() and time.monotonic() < deadline:
        if children := outer.children():
            return children[0]
        time.sleep(0.01)
    return None
