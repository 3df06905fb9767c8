"""Two hosts that have IPv6 and nothing else, each in its own network namespace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.server_and_client import split_address
from paceline.contract.run_folder import DONE, read_verdict
from tests.agent.rendezvous.test_two_agents import CLEANUP, SCRIPT, Pair

HEAD, MEMBER = "fd00:7::1", "fd00:7::2"
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="only root can make network namespaces",
)


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """The commands that enter two hosts. They are connected by a cable, and have no IPv4, not even to themselves."""
    with ExitStack() as stack:
        processes = []
        for _ in range(2):
            process = stack.enter_context(
                subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            )
            stack.callback(process.terminate)
            processes.append(process)
        enter = [["nsenter", f"--net=/proc/{process.pid}/ns/net"] for process in processes]
        outside = os.readlink("/proc/self/ns/net")
        for process in processes:
            while os.readlink(f"/proc/{process.pid}/ns/net") == outside:
                assert process.poll() is None

        def ip(host: int, *args: str) -> None:
            subprocess.run([*enter[host], "ip", *args], check=True)

        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(processes[1].pid)]
        ip(0, "link", "add", "eth0", *cable)
        for host, address in enumerate((HEAD, MEMBER)):
            ip(host, "link", "set", "lo", "up")
            ip(host, "addr", "del", "127.0.0.1/8", "dev", "lo")
            ip(host, "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
            ip(host, "link", "set", "eth0", "up")
        yield enter[0], enter[1]


# Rank 0 listens where torch's store would, beside the reserved port; rank 1 connects.
TALK = """
import os, socket, time
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print("ranks", address, os.environ["NCCL_SOCKET_FAMILY"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
if os.environ["RANK"] == "0":
    server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    server.accept()[0].sendall(b"hello")
else:
    for _ in range(600):
        try:
            with socket.create_connection((address, port)) as sock:
                assert sock.recv(5) == b"hello"
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise SystemExit("rank 0 cannot be reached")
"""


@needs_namespaces
def test_agents_and_ranks_meet_over_ipv6(
    tmp_path: Path, hosts: tuple[list[str], list[str]]
) -> None:
    with Pair(tmp_path / "run", TALK, light=True, enter=hosts, address=f"[{HEAD}]") as run:
        assert run.codes() == [0, 0], run.console(0) + run.console(1)
        for rank in (0, 1):
            assert f"ranks {HEAD} AF_INET6 eth0" in run.log(rank)
        assert run.job_start.head.read_text().startswith(f"[{HEAD}]:")


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("style", ["fork", "torchrun"])
def test_gloo_reduces_over_ipv6(
    tmp_path: Path, hosts: tuple[list[str], list[str]], style: str
) -> None:
    with Pair(
        tmp_path / "run", SCRIPT + CLEANUP, enter=hosts, address=f"[{HEAD}]", style=style
    ) as run:
        assert run.codes() == [0, 0], run.console(0) + run.console(1)
        assert "sum 1 of 2 node 1" in run.log(1)
        assert read_verdict(run.job_start.verdict) == DONE


@needs_namespaces
def test_one_host_reaches_itself_without_ipv4(hosts: tuple[list[str], list[str]]) -> None:
    program = (
        "from paceline.agent.rendezvous import network; import socket; listener = network.bind_port(0, backlog=1);"
        "address = network.loopback(); port = listener.getsockname()[1];"
        "print(network.join_address(address, port).partition(']')[0]);"
        "socket.create_connection((address, port)).close()"
    )
    done = subprocess.run(
        [*hosts[0], sys.executable, "-c", program], text=True, capture_output=True, check=True
    )
    assert done.stdout == "[::1\n"


def test_ipv4_peers_of_a_dual_stack_socket_keep_their_addresses() -> None:
    with network.bind_port(0, backlog=1) as listener:
        port = listener.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as sock,
            listener.accept()[0] as accepted,
        ):
            assert network.plain_address(accepted.getpeername()[0]) == "127.0.0.1"
            assert sock.getpeername()[1] == port
    assert network.plain_address("fd00::1") == "fd00::1"


def test_addresses_have_brackets_where_they_need_them() -> None:
    for host in ("node1", "10.0.0.1", "fd00::1"):
        assert split_address(network.join_address(host, 29500)) == (host, 29500)
    assert network.join_address("fd00::1", 1) == "[fd00::1]:1"
