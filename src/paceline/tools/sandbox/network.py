"""Ports, subnets and interface names that no other sandbox uses, and the network of nodes in
namespaces: a bridge on this machine, and a virtual cable (veth pair) to each node.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from paceline.contract.files import make_own_folder, open_own_file
from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox.packages import program
from paceline.tools.sandbox.processes import Process
from paceline.tools.sandbox.settings import SandboxRecord


def fingerprint(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()


@contextmanager
def allocation_lock() -> Iterator[None]:
    """Hold a lock, so that two sandboxes that start at once do not choose the same port."""
    path = make_own_folder(tempfile.gettempdir()) / "sandbox.lock"
    descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def free_ports(folder: Path, count: int) -> list[int]:
    """Return free ports below the kernel's ephemeral range, so that outgoing connections do not
    take them.
    """
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    first = 1_100 if int(ephemeral[0]) < 12_000 else 10_000
    end = max(int(ephemeral[0]), first + 2_000)
    start = int(fingerprint(folder)[:8], 16)
    candidates = (first + (start + step) % (end - first) for step in range(end - first))
    return list(islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def free_subnet(folder: Path) -> str:
    """Return a subnet 10.x.y that no interface or route of this machine uses."""
    ip = program("ip")
    routes = subprocess.run(
        [ip, "-4", "-o", "route", "show", "table", "all"], text=True, capture_output=True
    )
    addresses = subprocess.run([ip, "-4", "-o", "address"], text=True, capture_output=True)
    used = {
        ".".join(item.split("/")[0].split(".")[:3])
        for item in (routes.stdout + addresses.stdout).split()
    }
    # Office networks and VPNs tend to use the lower half of 10/8, so stay in the upper half.
    start = int(fingerprint(folder)[8:16], 16)
    for step in range(127 * 256):
        index = (start + step) % (127 * 256)
        subnet = f"10.{128 + index // 256}.{index % 256}"
        if subnet not in used:
            return subnet
    raise EnvironmentProblem(
        "No subnet in 10.128.0.0/9 is free on this machine.", hint="Use --network plain."
    )


def bridge_name(folder: Path) -> str:
    """Return a name that stays within the kernel's 15 characters after a node number is
    appended.
    """
    return f"pl{fingerprint(folder)[:7]}"


def ip(*args: str, check: bool = True) -> str:
    """Run the `ip` command and return its output."""
    done = subprocess.run([program("ip"), *args], text=True, capture_output=True)
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
