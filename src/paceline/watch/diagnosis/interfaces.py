"""Whether the ranks talk over the right network interface."""

from __future__ import annotations

import re

from paceline.contract.findings import GOOD, PROBLEM, Finding
from paceline.watch.diagnosis.evidence import AgentEvidence, Evidence

DOCS = "docs/troubleshooting.md#the-wrong-interface-or-address"
_VIRTUAL = re.compile(r"^(lo|docker|virbr|veth|br-|cni|flannel|cali)")
# What gloo, NCCL and our communication check say if ranks cannot connect.
COMMUNICATION = re.compile(
    r"connectFullMesh|first all-reduce|could not reach the other ranks|Unable to find "
    r"address|Unable to find interface"
    r"|gloo.*(connect|timed out|Timeout)|NCCL.*(unhandled system error|Bootstrap|socket|no socket "
    r"interface)"
    r"|no interface|Timed out waiting \d+ms for (send|recv) operation|enforce fail.*gloo/transport",
    re.IGNORECASE,
)


def check_interfaces(evidence: Evidence) -> list[Finding]:
    """Compare the interface that the user has chosen with the one that leads to the other nodes."""
    agents = [agent for agent in evidence.agents.values() if agent.network is not None]
    if not agents:
        return []
    by_host = {agent.host: agent for agent in agents}
    failed = is_communication_failure(evidence)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wrong = {
            host: reason
            for host, agent in by_host.items()
            if (reason := _reason(agent, variable, failed))
        }
        if wrong:
            return [_finding(variable, wrong, by_host)]
    used = ", ".join(f"{host} {_effective(agent)}" for host, agent in list(by_host.items())[:8])
    return [Finding("interface", GOOD, f"the ranks use {used}")]


def is_communication_failure(evidence: Evidence) -> bool:
    return any(
        COMMUNICATION.search(str(evidence.failure.get(key, "")))
        for key in ("message", "traceback", "last_line")
    )


def _reason(agent: AgentEvidence, variable: str, failed: bool) -> str:
    """Return what is wrong with the user's choice on a node; empty if nothing is known to be."""
    network = agent.network or {}
    chosen = (network.get("set") or {}).get(variable)
    known, route = agent.node.get("interfaces") or {}, network.get("interface")
    if not chosen or chosen.startswith("^"):
        return ""
    names = [name for name in known if _matches(name, chosen)]
    have = ", ".join(f"{name} {address}" for name, address in known.items())
    if not names:
        return f"{agent.host} has no interface {chosen}, only {have}"
    if route is None or route in names:
        return ""
    if all(_VIRTUAL.match(name) for name in names):
        return (
            f"{agent.host}: {names[0]} does not lead to other nodes; the way to "
            f"{network.get('peer')} is {route}"
        )
    if failed:
        return (
            f"{agent.host}: {names[0]} has {known[names[0]]}, but the way to "
            f"{network.get('peer')} is {route}"
        )
    return ""


def _matches(name: str, chosen: str) -> bool:
    """Whether a list such as `=eth0` (exactly), `eth` (a prefix) or `ib0,ib1` includes an
    interface.
    """
    for each in chosen.split(","):
        wanted = each.strip().partition(":")[0]
        if name == wanted.removeprefix("=") or (
            not wanted.startswith("=") and wanted and name.startswith(wanted)
        ):
            return True
    return False


def _finding(variable: str, wrong: dict[str, str], by_host: dict[str, AgentEvidence]) -> Finding:
    first = by_host[next(iter(wrong))].network or {}
    chosen, route = (first.get("set") or {}).get(variable), first.get("interface")
    use = f"Leave {variable} out, and Paceline chooses the interface that leads to the other nodes"
    return Finding(
        "interface",
        PROBLEM,
        f"The ranks use the wrong network interface: {variable} is {chosen}.",
        f"{use}{f' ({route})' if route else ''}; or set it to one that all nodes share.",
        evidence=tuple(wrong.values())[:8],
        docs=DOCS,
    )


def _effective(agent: AgentEvidence) -> str:
    network = agent.network or {}
    chosen = {**(network.get("chosen") or {}), **(network.get("set") or {})}
    name = str(
        chosen.get("GLOO_SOCKET_IFNAME")
        or chosen.get("NCCL_SOCKET_IFNAME")
        or network.get("interface")
        or "lo"
    )
    address = (agent.node.get("interfaces") or {}).get(name.removeprefix("="), "")
    return f"{name.removeprefix('=')} {address}".strip()
