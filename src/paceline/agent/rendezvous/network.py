"""This node's addresses and network interfaces, and the variables that point NCCL and gloo at the
right one.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
# ssh, slurmd, and one that nobody uses: a firewall that blocks the port of a run lets one of them
# through.
_ANSWERED_PORTS = (22, 6818, 9)
_ANSWER_TIMEOUT = 2.0  # seconds
_LINK_SCOPE = "20"  # in /proc/net/if_inet6


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def ipv6_interfaces() -> list[tuple[str, str]]:
    """Return each interface with an IPv6 address of it."""
    import ipaddress

    found = []
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            found.append((name, f"{address}%{name}" if scope == _LINK_SCOPE else address))
    return found


def loopback() -> str:
    """Return the address at which this machine reaches itself."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return "::1"
    return LOOPBACK


def plain_address(address: str) -> str:
    """Return an address as other programs know it: a dual-stack socket shows an IPv4 peer as
    ::ffff:10.0.0.1.
    """
    mapped = address.removeprefix("::ffff:")
    return mapped if "." in mapped else address


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_port(port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket on this port for IPv4 and IPv6, or what this machine has of them. With a
    backlog it listens.
    """
    has_both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
        if backlog is not None:
            sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def resolve(host: str, *, agent: str) -> list[str]:
    """Return the addresses of a host, the best one first.

    Never fall back to this machine: that would silently train a world of one.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"{agent} cannot resolve the head node's name {host!r}: {error.strerror or error}.",
            hint=f"Check `getent hosts {host}` on that node, and exclude the node (--exclude) "
            "until it works.",
        ) from None
    # IPv4 first: gloo and NCCL bootstrap over it on nearly every cluster.
    found.sort(key=lambda item: (item[0] != socket.AF_INET, str(item[4][0]).startswith("fe80:")))
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def answers(address: str) -> bool:
    """Return whether a host responds at all: its kernel refuses a connection to a port where
    nobody listens.
    """
    for port in _ANSWERED_PORTS:
        try:
            socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            continue
        return True
    return False


def describe_reach(host: str) -> dict[str, Any]:
    """Return what this node knows about the way to a host that it cannot connect to."""
    try:
        addresses = resolve(host, agent="")
    except LaunchError:
        addresses = []
    first = addresses[0] if addresses else ""
    return {
        "resolved": addresses,
        "interface": interface_towards(first) if first else None,
        "answers": answers(first) if first else False,
    }


def interface_towards(address: str) -> str | None:
    """Return the interface that the kernel uses to reach an address; None if the address is this
    machine's own.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends no packet: it only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, interface_address in (*interfaces().items(), *ipv6_interfaces()):
        if interface_address == own and name != "lo":
            return name
    return None


def describe_network(variables: Mapping[str, str]) -> str:
    """Return which interface the ranks use and which variables choose it. NCCL's "=" before a name
    means exactly it.
    """
    chosen = [name for name in variables if name.endswith("_IFNAME")]
    interface = variables[chosen[0]].removeprefix("=")
    others = [f"{name}={value}" for name, value in variables.items() if name not in chosen]
    return ", ".join(
        [
            f"network: interface {interface} (to use another one, set {' and '.join(chosen)})",
            *others,
        ]
    )


def network_variables(
    *, nodes: int, peer: str, environ: Mapping[str, str], runtime: Mapping[str, Any]
) -> dict[str, str]:
    """Return the variables to set for the ranks of this node. Variables that the user has set are
    left alone.

    `peer` is an address on another node (the head node's, or for the head node a member's): the
    interface that leads there is the one to train over.
    """
    variables: dict[str, str] = {}
    if nodes > 1:
        name = interface_towards(peer)
        if name is not None:
            variables["NCCL_SOCKET_IFNAME"] = f"={name}"  # "=" means this exact name, not a prefix
            variables["GLOO_SOCKET_IFNAME"] = name
        if ":" in peer:
            variables["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    if runtime.get("debug"):
        variables["NCCL_DEBUG"] = "INFO"
        variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return {name: value for name, value in variables.items() if name not in environ}
