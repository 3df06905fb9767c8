"""Ports, a subnet and names that no other sandbox has: where to look first comes from the folder's own hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.sandbox.packages import program


def fingerprint(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two sandboxes that come up together must not find the same port free: one chooses, then the other."""
    path = Path(tempfile.gettempdir()) / f"paceline-sandbox-{os.geteuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def free_ports(folder: Path, count: int) -> list[int]:
    """Ports below those that the kernel lends to outgoing connections, so that they stay free while unused."""
    lent = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    first, end = 10_000, int(lent[0])
    if end - first < 2_000:
        first, end = 1_100, 32_768
    start = int(fingerprint(folder)[:8], 16)
    candidates = (first + (start + step) % (end - first) for step in range(end - first))
    found = list(islice(filter(_free, candidates), count))
    if len(found) < count:
        raise EnvironmentProblem(f"{count} free ports were not found between {first} and {end}")
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def free_subnet(folder: Path) -> str:
    """A 10.x.y that no interface and no route of this machine touches."""
    ip = program("ip")
    told = subprocess.run([ip, "-4", "-o", "route", "show", "table", "all"], text=True, capture_output=True)
    told_too = subprocess.run([ip, "-4", "-o", "address"], text=True, capture_output=True)
    taken = {
        ".".join(word.split("/")[0].split(".")[:3]) for word in (told.stdout + told_too.stdout).split()
    }  # fmt: skip
    # The wide networks of an office or a VPN lie low in 10/8: stay in its upper half.
    start = int(fingerprint(folder)[8:16], 16)
    for step in range(127 * 256):
        place = (start + step) % (127 * 256)
        subnet = f"10.{128 + place // 256}.{place % 256}"
        if subnet not in taken:
            return subnet
    raise EnvironmentProblem("no subnet of 10.128.0.0/9 is free on this machine")


def bridge_name(folder: Path) -> str:
    """Up to 15 characters with the node's number behind it, which is all that the kernel takes."""
    return f"pl{fingerprint(folder)[:7]}"
