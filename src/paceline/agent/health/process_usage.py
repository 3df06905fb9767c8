"""What processes use, as a sign that they make progress: CPU time, and bytes of files and TCP
connections.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.agent.workers import process_tree

# Of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h, for a list of all TCP sockets as `ss
# -ti` prints it.
_NETLINK_SOCK_DIAG = 4
_LIST_SOCKETS = 20
_FLAGS = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_TCP_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states; any address
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_INODE = struct.Struct("=I")
_TRAFFIC = struct.Struct("=QQ")  # bytes acknowledged, bytes received
_INODE_OFFSET, _ATTRIBUTES_OFFSET, _TRAFFIC_OFFSET = 68, 72, 120
_TIMEOUT = 1.0  # seconds for the kernel's answer


class Usage(NamedTuple):
    """What a process has used, together with its descendants."""

    cpu: float  # seconds
    io: int  # bytes read and written, through system calls and TCP connections
    is_suspended: bool  # a thread waits for a disk, or is stopped by a signal or a debugger
    has_children: bool


def tree_usage(roots: Iterable[int]) -> dict[int, Usage]:
    """Return what each of these processes uses. Those that are gone are left out."""
    stats = process_tree.read_stats()
    traffic = _tcp_traffic()
    usage = {}
    for root in set(roots) & set(stats):
        tree = {root, *process_tree.descendants(root, stats)}
        # User and system time, of the process and of its children that have ended.
        ticks = sum(int(count) for pid in tree for count in stats[pid][11:15])
        sockets = {inode for pid in tree for inode in _sockets(pid)}
        io = sum(map(_transferred, tree)) + sum(traffic.get(inode, 0) for inode in sockets)
        suspended = any(state in b"DTt" for pid in tree for state in _thread_states(pid))
        usage[root] = Usage(ticks / os.sysconf("SC_CLK_TCK"), io, suspended, len(tree) > 1)
    return usage


def _transferred(pid: int) -> int:
    """Return the bytes of read and write calls; `send` and `recv` do not count as such."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _thread_states(pid: int) -> Iterator[bytes]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, IndexError):
                yield (
                    Path(f"/proc/{pid}/task/{task}/stat")
                    .read_bytes()
                    .rpartition(b")")[2]
                    .split()[0]
                )


def _sockets(pid: int) -> Iterator[int]:
    """Return the inodes of a process's sockets."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")
                if kind == "socket":
                    yield int(inode[1:-1])


def _tcp_traffic() -> dict[int, int]:
    """Map the inodes of this host's TCP sockets to the bytes they transferred; empty if the kernel
    does not tell.
    """
    traffic: dict[int, int] = {}
    if hasattr(socket, "AF_NETLINK"):
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError, struct.error):
                traffic.update(_list_sockets(family))
    return traffic


def _list_sockets(family: int) -> Iterator[tuple[int, int]]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.settimeout(_TIMEOUT)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), _ALL_STATES)
        kernel.send(
            _HEADER.pack(_HEADER.size + len(request), _LIST_SOCKETS, _FLAGS, 0, 0) + request
        )
        while True:
            answer = kernel.recv(1 << 16)
            start = 0
            while start < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, start)
                if kind in (_ERROR, _DONE):
                    return
                yield _read_socket(answer[start + _HEADER.size : start + length])
                start += _align(length)


def _read_socket(message: bytes) -> tuple[int, int]:
    """Return a socket's inode and the bytes that it transferred."""
    inode: int = _INODE.unpack_from(message, _INODE_OFFSET)[0]
    start = _ATTRIBUTES_OFFSET
    while start < len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, start)
        if kind == _TCP_INFO:
            return inode, sum(
                _TRAFFIC.unpack_from(message, start + _ATTRIBUTE.size + _TRAFFIC_OFFSET)
            )
        start += _align(length)
    return inode, 0


def _align(length: int) -> int:
    return max(4, (length + 3) & ~3)
