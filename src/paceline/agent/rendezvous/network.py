"""This node's addresses and interfaces, and the variables that NCCL and gloo need to find the right one."""

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
_VIRTUAL = (
    "lo",
    "docker",
    "virbr",
    "veth",
    "br-",
    "cni",
    "flannel",
    "cali",
)  # nothing trains over these unasked


def interfaces() -> dict[str, str]:
    """IPv4 address by interface name; interfaces without one are left out."""
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
    """This node's own addresses, those that others can reach first."""
    ranked = sorted(interfaces().items(), key=lambda item: (item[0].startswith(_VIRTUAL), item[0]))
    return [address for _, address in ranked]


def resolve(host: str, *, asked_by: str) -> str:
    """The address of a host. There is no fallback to this machine: a wrong head would be a silent world of one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"{asked_by} cannot resolve the head's host name {host!r}: {error.strerror or error}",
            hint=f"on that node `getent hosts {host}` must answer; leave the node out (--exclude) until it does",
        ) from None
    # IPv4 first: gloo and NCCL bootstrap over it on nearly every cluster.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def interface_towards(address: str) -> str | None:
    """The interface whose address the kernel would use to reach an address; None when it is this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent: only the route is chosen
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for name, its in interfaces().items():
        if its == mine and name != "lo":
            return name
    return None


def has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def roce_gid_index(devices: Path = Path("/sys/class/infiniband")) -> int | None:
    """The address table's entry for RoCE v2 over IPv4, where all Ethernet ports agree on it; else NCCL's own choice.

    The default entry is often RoCE v1 or link-local: adapters then find no way to each other.
    """
    chosen = set()
    for port in devices.glob("*/ports/*"):
        try:
            if (port / "link_layer").read_text().strip() != "Ethernet":
                return None  # InfiniBand proper needs no such choice
        except OSError:
            continue
        usable = [int(entry.name) for entry in port.glob("gids/*") if _is_roce_v2(port, entry)]
        chosen.add(min(usable, default=None))
    return chosen.pop() if len(chosen) == 1 else None


def _is_roce_v2(port: Path, entry: Path) -> bool:
    try:
        kind = (port / "gid_attrs" / "types" / entry.name).read_text().strip()
        return kind == "RoCE v2" and entry.read_text().startswith("0000:0000:0000:0000:0000:ffff:")
    except OSError:  # an entry that is not in use cannot be read
        return False


def network_variables(
    *,
    nodes: int,
    peer: str,
    environ: Mapping[str, str],
    runtime: Mapping[str, Any],
    infiniband: bool | None = None,
) -> dict[str, str]:
    """What to set for the ranks of this node. A name that the user has set is the user's.

    `peer` is an address on another node (the head's, or for the head a member's): the way there is the
    interface to train over.
    """
    wanted: dict[str, str] = {}
    if nodes > 1:
        name = interface_towards(peer)
        if name is not None:
            wanted["NCCL_SOCKET_IFNAME"] = f"={name}"  # "=": this name exactly, not as a prefix
            wanted["GLOO_SOCKET_IFNAME"] = name
        if not (has_infiniband() if infiniband is None else infiniband):
            wanted["NCCL_IB_DISABLE"] = "1"
        elif (index := roce_gid_index()) is not None:
            wanted["NCCL_IB_GID_INDEX"] = str(index)
    if runtime.get("debug"):
        wanted["NCCL_DEBUG"] = "INFO"
        wanted["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return {name: value for name, value in wanted.items() if name not in environ}
