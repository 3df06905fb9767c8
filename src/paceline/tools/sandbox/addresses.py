"""Ports, subnets and interface names that no other sandbox uses. The search starts at a hash of
the folder's path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from paceline.contract.files.shared_folders import make_own_folder, open_own_file
from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox.packages import program


def fingerprint(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()


@contextmanager
def allocation_lock() -> Iterator[None]:
    """Hold a lock, so that two sandboxes that start at the same time do not choose the same port.

    The lock ends with the process that holds it, and the file names that process for those who
    wait.
    """
    path = make_own_folder(tempfile.gettempdir()) / "sandbox.lock"
    descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace")
            what = f"waiting for another sandbox to start: process {holder} holds {path}"
            print(f"paceline: {what}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def free_ports(folder: Path, count: int) -> list[int]:
    """Return free ports below the kernel's ephemeral range, so that outgoing connections do not
    take them.
    """
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    first, end = 10_000, int(ephemeral[0])
    if end - first < 2_000:
        first, end = 1_100, 32_768
    start = int(fingerprint(folder)[:8], 16)
    candidates = (first + (start + step) % (end - first) for step in range(end - first))
    found = list(islice(filter(_is_free, candidates), count))
    if len(found) < count:
        raise EnvironmentProblem(
            f"There are no {count} free ports between {first} and {end}.",
            hint="Stop other servers on this machine, or start fewer nodes.",
        )
    return found


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
