"""Network interfaces and the variables for NCCL and gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.agent.rendezvous import network
from paceline.errors import LaunchError


def test_network_variables_are_for_several_nodes_and_never_override_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda _: "ib0")
    common: dict[str, Any] = {"peer": "10.0.0.2", "infiniband": False}
    assert network.network_variables(nodes=1, environ={}, runtime={}, **common) == {}
    both = network.network_variables(nodes=2, environ={}, runtime={}, **common)
    assert both == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_DISABLE": "1",
    }
    shown = network.describe_network(both)
    choice = "to use another one, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    assert shown == f"network: interface ib0 ({choice}), NCCL_IB_DISABLE=1"
    mine = network.network_variables(
        nodes=2,
        environ={"NCCL_SOCKET_IFNAME": "eth1"},
        runtime={"debug": True},
        peer="10.0.0.2",
        infiniband=True,
    )
    assert mine == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "INFO",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }


def test_interfaces_of_this_machine() -> None:
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") is None  # within one machine any interface works
    for name, address in network.interfaces().items():
        if name != "lo":
            assert network.interface_towards(address) in (name, None)


def test_the_error_about_an_unknown_host_names_host_and_node() -> None:
    with pytest.raises(LaunchError, match=r"node b cannot resolve .*'no-such-host.invalid'"):
        network.resolve("no-such-host.invalid", agent="Agent 2 of 2 on node b")
    assert network.resolve("127.0.0.1", agent="Agent 2 of 2 on node b") == ["127.0.0.1"]


def adapter(devices: Path, name: str, layer: str, entries: list[tuple[str, str]]) -> None:
    """Write what the kernel shows of one network adapter."""
    port = devices / name / "ports" / "1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (port / "link_layer").write_text(layer + "\n")
    for index, (kind, address) in enumerate(entries):
        (port / "gids" / str(index)).write_text(address + "\n")
        if kind:  # the type of an unused entry cannot be read
            (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def test_the_gid_index_of_roce_v2_is_found_if_all_adapters_agree(tmp_path: Path) -> None:
    local, mapped = (
        "fe80:0000:0000:0000:0000:0000:0000:0001",
        "0000:0000:0000:0000:0000:ffff:0a00:0001",
    )
    table = [
        ("IB/RoCE v1", local),
        ("RoCE v2", local),
        ("IB/RoCE v1", mapped),
        ("RoCE v2", mapped),
        ("", mapped),
    ]
    assert network.roce_gid_index(tmp_path / "none") is None
    adapter(tmp_path / "same", "mlx5_0", "Ethernet", table)
    adapter(tmp_path / "same", "mlx5_1", "Ethernet", table)
    assert network.roce_gid_index(tmp_path / "same") == 3
    adapter(tmp_path / "other", "mlx5_0", "Ethernet", table)
    adapter(tmp_path / "other", "mlx5_1", "Ethernet", table[1:])
    assert network.roce_gid_index(tmp_path / "other") is None
    adapter(tmp_path / "infiniband", "mlx5_0", "InfiniBand", table)
    assert network.roce_gid_index(tmp_path / "infiniband") is None
