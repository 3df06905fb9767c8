"""This node's addresses and network interfaces, and the variables that point NCCL and gloo at the right one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
# Ranks never train over these unless the user asks for it.
_VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali")


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


def addresses() -> list[str]:
    """Return this node's addresses, those that other nodes can reach first."""
    ranked = sorted(interfaces().items(), key=lambda item: (item[0].startswith(_VIRTUAL), item[0]))
    return [address for _, address in ranked]


def resolve(host: str, *, agent: str) -> str:
    """Return the address of a host. Never fall back to this machine: that would silently train a world of one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"{agent} cannot resolve the head node's name {host!r}: {error.strerror or error}.",
            hint=f"Check `getent hosts {host}` on that node, and exclude the node (--exclude) until it works.",
        ) from None
    # IPv4 first: gloo and NCCL bootstrap over it on nearly every cluster.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def interface_towards(address: str) -> str | None:
    """Return the interface that the kernel uses to reach an address; None if the address is this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends no packet: it only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, interface_address in interfaces().items():
        if interface_address == own and name != "lo":
            return name
    return None


def has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def roce_gid_index(devices: Path = Path("/sys/class/infiniband")) -> int | None:
    """Return the GID index for RoCE v2 over IPv4 if all Ethernet ports agree on it; None leaves the choice to NCCL.

    The default entry is often RoCE v1 or link-local, and then adapters cannot reach each other.
    """
    chosen = set()
    for port in devices.glob("*/ports/*"):
        try:
            if (port / "link_layer").read_text().strip() != "Ethernet":
                return None  # real InfiniBand needs no GID index
        except OSError:
            continue
        usable = [int(entry.name) for entry in port.glob("gids/*") if _is_roce_v2(port, entry)]
        chosen.add(min(usable, default=None))
    return chosen.pop() if len(chosen) == 1 else None


def _is_roce_v2(port: Path, entry: Path) -> bool:
    try:
        kind = (port / "gid_attrs" / "types" / entry.name).read_text().strip()
        return kind == "RoCE v2" and entry.read_text().startswith("0000:0000:0000:0000:0000:ffff:")
    except OSError:  # unused entries cannot be read
        return False


def network_variables(
    *, nodes: int, peer: str, environ: Mapping[str, str], runtime: Mapping[str, Any], infiniband: bool | None = None
) -> dict[str, str]:
    """Return the variables to set for the ranks of this node. Variables that the user has set are left alone.

    `peer` is an address on another node (the head node's, or for the head node a member's): the interface that leads
    there is the one to train over.
    """
    variables: dict[str, str] = {}
    if nodes > 1:
        name = interface_towards(peer)
        if name is not None:
            variables["NCCL_SOCKET_IFNAME"] = f"={name}"  # "=" means this exact name, not a prefix
            variables["GLOO_SOCKET_IFNAME"] = name
        if not (has_infiniband() if infiniband is None else infiniband):
            variables["NCCL_IB_DISABLE"] = "1"
        elif (index := roce_gid_index()) is not None:
            variables["NCCL_IB_GID_INDEX"] = str(index)
    if runtime.get("debug"):
        variables["NCCL_DEBUG"] = "INFO"
        variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return {name: value for name, value in variables.items() if name not in environ}
