"""Who has not arrived, why not, and who was lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.quantities import show_seconds
from paceline.watch.diagnosis.evidence import AgentEvidence, Evidence

DOCS = "docs/troubleshooting.md"
MAX_NAMED = 8
GONE = ("", "Z", "X")  # the kernel's state letter of a process that does not run any more


def check_arrival(evidence: Evidence) -> list[Finding]:
    """Name the agents that have not joined, each with the reason."""
    agents, expected = evidence.agents, evidence.expected
    if not agents:
        return []
    if all(index in agents and agents[index].joined for index in range(expected)):
        hosts = {agent.host: f"{agent.host} ({agent.addresses})" for agent in agents.values()}
        # `paceline run --nodes 2` has all of its agents on one machine.
        count = expected if evidence.record.job is None else len(hosts)
        where = ", all on" if count > len(hosts) else ":"
        text = f"{count} of {count} have joined{where} {_list(hosts.values())}"
        return [Finding("nodes", GOOD, text)]
    missing = [index for index in range(expected) if index not in agents]
    blocked = {
        agent.host: agent
        for agent in agents.values()
        if agent.last("unreachable") and not agent.joined
    }
    # once the run is over, others may have been ended before they could say anything
    knows_why = bool(blocked) and evidence.record.is_over
    found = [_absent(evidence, missing)] if missing and not knows_why else []
    return [*found, *(_blocked(agent, agents.get(0)) for agent in blocked.values())]


def _absent(evidence: Evidence, missing: list[int]) -> Finding:
    hosts = list(dict.fromkeys(evidence.host_of_agent(index) for index in missing))
    here = dict.fromkeys(agent.host for agent in evidence.agents.values())
    errors = [
        f"slurm.log: {line.strip()[:200]}"
        for line in evidence.batch_log.splitlines()
        if "error" in line and any(host in line for host in hosts)
    ]
    return Finding(
        "nodes",
        PROBLEM,
        f"No agent has started on {_list(hosts)}: the others wait for it.",
        f"Check the node: sinfo -R -n {','.join(hosts)}; or open a shell there: `paceline shell "
        f"RUN --node {hosts[0]}`. To continue without it, add --exclude {','.join(hosts)}.",
        (
            f"{_list(here)} started",
            f"events/ has nothing from agent {_list(map(str, missing))}",
            *errors[-1:],
        ),
        f"{DOCS}#a-node-has-not-joined",
    )


def _blocked(agent: AgentEvidence, head: AgentEvidence | None) -> Finding:
    """Say what stands between an agent and the head agent."""
    event = agent.last("unreachable")
    address, error = str(event.get("address", "?")), str(event.get("error", "?"))
    host, _, port = address.rpartition(":")
    resolved = [str(each) for each in event.get("resolved") or []]
    facts = [
        f"{agent.host} ({agent.addresses}) cannot connect to {address}: {error}",
        f"on {agent.host}, {host} is {_list(resolved) or 'unknown'}",
    ]
    if head is not None:
        facts.append(f"the head node {head.host} has {head.addresses}, and listens on port {port}")
    without = f"--exclude {agent.host}"
    if not resolved:
        about, section = "name", "a-node-has-not-joined"
        text = f"{agent.host} cannot resolve the name of the head node, {host}."
        hint = f"Check `getent hosts {host}` there. Until it works, exclude the node: {without}."
    elif head is not None and head.interfaces and not {*head.interfaces.values()} & {*resolved}:
        about, section = "address", "the-wrong-interface-or-address"
        text = (
            f"{agent.host} resolves {host} to {resolved[0]}, which is not an address of that node."
        )
        hint = f"Correct /etc/hosts or DNS on {agent.host}, or exclude the node: {without}."
    elif event.get("answers"):
        about, section = "firewall", "a-firewall"
        facts.append(f"{resolved[0]} answers on other ports")
        text = f"A firewall blocks port {port} between {agent.host} and {host}."
        hint = (
            "Ask your administrators to open all TCP ports between compute nodes: ranks choose "
            "theirs at random."
        )
    else:
        about, section = "network", "a-node-was-lost"
        text = f"{agent.host} cannot reach {host} at all: the network between them is down."
        hint = (
            f"Check the link with `ping {resolved[0]}` on {agent.host}. To continue without the "
            f"node, add {without}."
        )
    return Finding(about, PROBLEM, text, hint, tuple(facts), f"{DOCS}#{section}")


def check_answers(evidence: Evidence) -> list[Finding]:
    """Name the nodes of a live run that do not answer, although others do."""
    silent = {each.host: each.problem for each in evidence.answers if each.problem}
    answered = [each.host for each in evidence.answers if not each.problem]
    if not silent and not answered:
        return []
    if not silent or not answered:
        why = next(iter(silent.values()), "")[:200]
        text = f"no node could be asked: {why}" if silent else f"from {_list(answered)}"
        return [Finding("answers", GOOD, text)]
    text = f"{_list(silent)} is not responding: it is down or disconnected."
    hosts = ",".join(silent)
    hint = f"Check the node: sinfo -R -n {hosts}. To continue without it, add --exclude {hosts}."
    facts = [f"{host}: {problem[:200]}" for host, problem in silent.items()]
    facts.append(f"{_list(answered)} answers")
    return [Finding("node", PROBLEM, text, hint, tuple(facts), f"{DOCS}#a-node-was-lost")]


def check_liveness(evidence: Evidence) -> list[Finding]:
    """Tell whether Slurm takes a dead job for a running one."""
    record, seconds = evidence.record, evidence.record.seconds_lifeless
    if seconds is None or record.state is None:
        return []
    facts = [f"the run's agents have written nothing for {show_seconds(seconds)}"]
    for answer in evidence.answers[:MAX_NAMED]:
        rows: Any = answer.answer.get("ranks")
        known = [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        if any(row[4] not in GONE for row in known if len(row) > 4):
            about, level, host = "agents", WARNING, answer.host
            text = f"The ranks on {host} are alive, but their agents write nothing."
            hint = f"Can {host} write to the run folder? Try: paceline shell RUN --node {host}"
            break
        facts.append(f"{answer.host}: {answer.problem[:200] or 'no rank of the run is there'}")
    else:
        about, level = "job", PROBLEM
        nodes = record.state.nodes
        text = f"Slurm shows job {record.job} as running, but {nodes} gives no sign of life."
        hint = f"Use {record.restart_command}."
    return [Finding(about, level, text, hint, tuple(facts), f"{DOCS}#no-sign-of-life")]


def check_lost(evidence: Evidence) -> list[Finding]:
    """Name the node that was lost in the newest attempt or before it began, and whether it lived
    on.
    """
    head, failure = evidence.agents.get(0), evidence.failure
    early = head.last("failed") if head is not None else {}
    if failure.get("cause") == "lost":
        host = str(failure.get("host", "?"))
        facts = [str(failure.get("message", ""))]
    elif early.get("lost_host"):
        host, facts = str(early["lost_host"]), [str(early.get("reason", ""))]
    else:
        return []
    lost = next((agent for agent in evidence.agents.values() if agent.host == host), None)
    if lost is not None and lost.lost:
        about, text = "network", f"The network connection to {host} was lost: the node was up."
        facts.append(f"the agent on {host} was still running: it lost {_list(lost.lost)} in turn")
        facts.append(f"{host} uses {lost.addresses}")
    else:
        about = "node"
        text = f"{host} was lost: it went down or lost its network connection."
        facts.append(f"the agent on {host} wrote nothing more")
    hint = f"Check the node: sinfo -R -n {host}. A submitted run is requeued without this node."
    return [Finding(about, PROBLEM, text, hint, tuple(facts), f"{DOCS}#a-node-was-lost")]


def _list(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more


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
    """Look for an interface that the user has chosen and that a node lacks, or, if the ranks could
    not connect, that does not lead to the other nodes.
    """
    agents = {agent.host: agent for agent in evidence.agents.values() if agent.last("network")}
    if not agents:
        return []
    said = (str(evidence.failure.get(key, "")) for key in ("message", "traceback", "last_line"))
    errors = [line for text in said for line in text.splitlines() if COMMUNICATION.search(line)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wrong = [
            why for agent in agents.values() if (why := _mismatch(agent, variable, bool(errors)))
        ]
        if wrong:
            chosen = next(iter(agents.values())).last("network").get("set", {}).get(variable)
            return [
                Finding(
                    "interface",
                    PROBLEM,
                    f"The ranks use the wrong network interface: {variable} is {chosen}.",
                    f"Leave {variable} out, and Paceline chooses the interface that leads to the "
                    "other nodes; or set it to one that all nodes share.",
                    (*wrong[:MAX_NAMED], *(error.strip()[:200] for error in errors[:1])),
                    f"{DOCS}#the-wrong-interface-or-address",
                )
            ]
    routes = [f"{host} {agent.last('network').get('interface')}" for host, agent in agents.items()]
    return [Finding("interface", GOOD, f"the way to the other nodes: {_list(routes)}")]


def _mismatch(agent: AgentEvidence, variable: str, failed: bool) -> str:
    """Return what is wrong with the user's choice on a node; empty if nothing is known to be."""
    network, known = agent.last("network"), agent.node.get("interfaces") or {}
    chosen, route = network.get("set", {}).get(variable), network.get("interface")
    if not chosen or chosen.startswith("^"):
        return ""
    # `=eth0` (exactly), `eth` (a prefix) or `ib0,ib1`
    listed = [each.strip().partition(":")[0] for each in chosen.split(",")]
    prefixes = tuple(filter(None, listed))
    names = [name for name in known if f"={name}" in listed or name.startswith(prefixes)]
    if not names:
        return f"{agent.host} has no interface {chosen}, only {agent.addresses}"
    if not failed or route is None or route in names:
        return ""
    return (
        f"{agent.host}: {names[0]} has {known[names[0]]}, but the way to {network.get('peer')} is "
        f"{route}"
    )
