"""Network interfaces and the variables for NCCL and gloo."""

from __future__ import annotations

import pytest

from paceline.agent.rendezvous import network
from paceline.errors import LaunchError


def test_network_variables_are_for_several_nodes_and_never_override_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda _: "ib0")
    assert network.network_variables(nodes=1, environ={}, runtime={}, peer="10.0.0.2") == {}
    both = network.network_variables(nodes=2, environ={}, runtime={}, peer="10.0.0.2")
    assert both == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    shown = network.describe_network(both)
    choice = "to use another one, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    assert shown == f"network: interface ib0 ({choice})"
    mine = network.network_variables(
        nodes=2, environ={"NCCL_SOCKET_IFNAME": "eth1"}, runtime={"debug": True}, peer="10.0.0.2"
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
