"""Nodes with namespaces of their own: a bridge on this machine, and a virtual cable to each node."""

from __future__ import annotations

import subprocess
import time

from paceline.errors import EnvironmentProblem
from paceline.sandbox.packages import program
from paceline.sandbox.processes import Process
from paceline.sandbox.settings import Record


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run([program("ip"), *words], text=True, capture_output=True)
    if check and done.returncode:
        raise EnvironmentProblem(
            f"ip {' '.join(words)}: {done.stderr.strip()}",
            hint="namespaces need root with CAP_NET_ADMIN; without it: --network plain",
        )
    return done.stdout


def make_bridge(record: Record) -> None:
    ip("link", "add", record.bridge, "type", "bridge")
    ip("address", "add", f"{record.controller_address}/24", "dev", record.bridge)
    ip("link", "set", record.bridge, "up")


def remove(record: Record) -> None:
    """Cables go with their nodes; what a broken start left is removed here."""
    if record.bridge:
        for node in record.settings.names:
            ip("link", "delete", record.cable(node), check=False)
        ip("link", "delete", record.bridge, check=False)


def plug_in(record: Record, node: str, init: Process) -> None:
    """A new cable from the bridge to a node. It vanishes together with the node's namespace."""
    cable = record.cable(node)
    ip("link", "delete", cable, check=False)  # the kernel takes a dead node's cable away with a delay
    ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
    ip("link", "set", cable, "master", record.bridge, "up")


def set_cable(record: Record, node: str, *, connected: bool) -> None:
    ip("link", "set", record.cable(node), "up" if connected else "down")


def is_cut(record: Record, node: str) -> bool:
    """Whether the cable is there but switched off."""
    told = ip("-o", "link", "show", record.cable(node), check=False)
    flags = told.partition("<")[2].partition(">")[0].split(",")
    return bool(told) and "UP" not in flags


def namespaces_of(outer: Process, *, timeout: float = 30.0) -> Process | None:
    """Process 1 of a node, as this machine sees it: the child of `unshare`, born inside the new namespaces."""
    deadline = time.monotonic() + timeout
    while outer.alive() and time.monotonic() < deadline:
        if children := outer.children():
            return children[0]
        time.sleep(0.01)
    return None
