"""Who has not arrived, why not, and who was lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.contract.stacks import NodeAnswer
from paceline.contract.verdict import DONE, FAILED
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import to_type
from paceline.watch.diagnosis.evidence import AgentEvidence, Evidence
from paceline.watch.run_status import newest_verdict

DOCS = "docs/troubleshooting.md"
MAX_NAMED = 8
GONE = ("", "Z", "X")  # the kernel's state letter of a process that does not run any more


def check_arrival(evidence: Evidence) -> list[Finding]:
    """Name the agents that have not joined, each with the reason."""
    agents, expected = evidence.agents, evidence.expected
    if not agents:
        return []
    if all(index in agents and agents[index].joined for index in range(expected)):
        hosts = {agent.host: f"{agent.host} ({agent.address})" for agent in agents.values()}
        # `paceline run --nodes 2` has all of its agents on one machine.
        count = expected if evidence.record.job is None else len(hosts)
        where = ", all on" if count > len(hosts) else ":"
        text = f"{count} of {count} have joined{where} {_list(hosts.values())}"
        return [Finding("nodes", GOOD, text)]
    missing = [index for index in range(expected) if index not in agents]
    blocked = {
        agent.host: agent
        for agent in agents.values()
        if agent.unreachable is not None and not agent.joined
    }
    # once the run is over, others may have been ended before they could say anything
    knows_why = bool(blocked) and evidence.record.is_over
    found = [_absent(evidence, missing)] if missing and not knows_why else []
    return [*found, *(_blocked(agent, evidence) for agent in blocked.values())]


def _absent(evidence: Evidence, missing: list[int]) -> Finding:
    hosts = list(dict.fromkeys(evidence.host_of_agent(index) for index in missing))
    here = [agent.host for agent in evidence.agents.values()]
    head = evidence.agents.get(0)
    since = (
        f", the first one {evidence.now - float(head.node.get('time', 0)):.0f} s ago"
        if head
        else ""
    )
    facts = [
        f"{_list(dict.fromkeys(here))} started{since if evidence.is_live else ''}",
        f"events/ has nothing from agent {_list(str(index) for index in missing)}",
    ]
    facts += [
        f"slurm.log: {line.strip()[:200]}"
        for line in evidence.batch_log.splitlines()
        if "error" in line and any(host in line for host in hosts)
    ][-1:]
    return Finding(
        "nodes",
        PROBLEM,
        f"No agent has started on {_list(hosts)}: the others wait for it.",
        f"Check the node: sinfo -R -n {','.join(hosts)}; or open a shell there: `paceline shell "
        "RUN --node "
        f"{hosts[0]}`. To continue without it, add --exclude {','.join(hosts)}.",
        evidence=tuple(facts),
        docs=f"{DOCS}#a-node-has-not-joined",
    )


def _blocked(agent: AgentEvidence, evidence: Evidence) -> Finding:
    """Say what stands between an agent and the head agent."""
    event = agent.unreachable or {}
    address, error = str(event.get("address", "?")), str(event.get("error", "?"))
    host, _, port = address.rpartition(":")
    resolved = [str(each) for each in event.get("resolved") or []]
    head = evidence.agents.get(0)
    over = f", over interface {event['interface']}" if event.get("interface") else ""
    facts = [
        f"{agent.host} ({agent.addresses}) cannot connect to {address}: {error}",
        f"on {agent.host}, {host} is {_list(resolved) or 'unknown'}{over}",
    ]
    if head is not None:
        facts.append(f"the head node {head.host} has {head.addresses}, and listens on port {port}")
    known = set((head.node.get("interfaces") or {}).values()) if head else set()
    without = f"--exclude {agent.host}"
    if not resolved:
        about, section = "name", "a-node-has-not-joined"
        text = f"{agent.host} cannot resolve the name of the head node, {host}."
        hint = f"Check `getent hosts {host}` there. Until it works, exclude the node: {without}."
    elif known and not known & set(resolved):
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
    if not evidence.answers:
        return []
    if not silent:
        return [Finding("answers", GOOD, f"from {_list(answered)}, next to the ranks")]
    if not answered:
        why = next(iter(silent.values()))[:200]
        return [Finding("answers", GOOD, f"no node could be asked: {why}")]
    hosts = _list(silent)
    return [
        Finding(
            "node",
            PROBLEM,
            f"{hosts} is not responding: it is down or disconnected.",
            f"Check the node: sinfo -R -n {','.join(silent)}. To continue without it, add --exclude"
            f" {','.join(silent)}.",
            evidence=(
                *(f"{host}: {problem[:200]}" for host, problem in silent.items()),
                f"{_list(answered)} answers",
            ),
            docs=f"{DOCS}#a-node-was-lost",
        )
    ]


def check_silence(evidence: Evidence) -> list[Finding]:
    """Tell whether Slurm takes a dead job for a running one."""
    record, silence = evidence.record, evidence.record.silence
    if silence is None or record.state is None:
        return []
    facts = [f"the run's agents have written nothing for {show_seconds(silence)}"]
    alive = [each.host for each in evidence.answers if _has_ranks(each)]
    if alive:
        return [
            Finding(
                "agents",
                WARNING,
                f"The ranks on {_list(alive)} are alive, but their agents write nothing.",
                f"Check that {alive[0]} can write to the run folder: `paceline shell RUN --node "
                f"{alive[0]}`.",
                evidence=tuple(facts),
                docs=f"{DOCS}#no-sign-of-life",
            )
        ]
    facts += [
        f"{each.host}: {each.problem[:200] or 'no rank of the run is there'}"
        for each in evidence.answers
    ]
    otherwise = (
        f" If Slurm refuses: `scancel {record.job}`, then "
        f"`{to_type(f'submit --resume {record.run_id}')}`."
    )
    what = (
        "Restart it from its newest checkpoint"
        if newest_verdict(record.folder) not in (DONE, FAILED)
        else "End it"
    )
    return [
        Finding(
            "job",
            PROBLEM,
            f"Slurm shows job {record.job} as running, but {record.state.nodes} gives no sign of "
            "life.",
            f"{what}: {record.restart_command}.{otherwise * record.restarts_by_requeue}",
            evidence=tuple(facts[:MAX_NAMED]),
            docs=f"{DOCS}#no-sign-of-life",
        )
    ]


def _has_ranks(answer: NodeAnswer) -> bool:
    rows = answer.answer.get("ranks")
    known = (
        [row for row in rows if isinstance(row, list) and len(row) > 4]
        if isinstance(rows, list)
        else []
    )
    return any(row[4] not in GONE for row in known)


def check_lost(evidence: Evidence) -> list[Finding]:
    """Name the node that was lost in the newest attempt or before it began, and whether it lived
    on.
    """
    head, failure = evidence.agents.get(0), evidence.failure
    if failure.get("cause") == "lost":
        number = evidence.attempt.number if evidence.attempt else "?"
        host = str(failure.get("host", "?"))
        facts = [f"attempt {number}: {failure.get('message', '')}"]
    elif head is not None and (host := _lost_early(head)):
        facts = [str((head.failed or {}).get("reason", ""))]
    else:
        return []
    lost = next((agent for agent in evidence.agents.values() if agent.host == host), None)
    others = ""
    if lost is not None:
        others = _list(str(event.get("host")) for event in lost.lost) or _lost_early(lost)
    if lost is not None and others:
        about = "network"
        facts.append(f"the agent on {host} was still running: it lost {others} in turn")
        facts.append(f"{host} uses {lost.addresses}")
        text = f"The network connection to {host} was lost: the node was up but unreachable."
    else:
        about = "node"
        facts.append(f"the agent on {host} wrote nothing more")
        text = f"{host} was lost: it went down or lost its network connection."
    hint = f"Check the node: sinfo -R -n {host}. A submitted run is requeued without this node."
    return [Finding(about, PROBLEM, text, hint, tuple(facts), f"{DOCS}#a-node-was-lost")]


def _lost_early(agent: AgentEvidence) -> str:
    """Return the node that an agent lost before an attempt began."""
    return str((agent.failed or {}).get("lost_host", ""))


def _list(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more


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
    said = (evidence.failure.get(key, "") for key in ("message", "traceback", "last_line"))
    failed = any(COMMUNICATION.search(str(text)) for text in said)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        reasons = {host: _reason(agent, variable, failed) for host, agent in by_host.items()}
        wrong = {host: reason for host, reason in reasons.items() if reason}
        if wrong:
            return [_finding(variable, wrong, by_host)]
    used = ", ".join(f"{host} {_effective(agent)}" for host, agent in list(by_host.items())[:8])
    return [Finding("interface", GOOD, f"the ranks use {used}")]


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
    is_suspect = failed or all(_VIRTUAL.match(name) for name in names)
    if route is None or route in names or not is_suspect:
        return ""
    way = f"the way to {network.get('peer')} is {route}"
    return f"{agent.host}: {names[0]} has {known[names[0]]}, but {way}"


def _matches(name: str, chosen: str) -> bool:
    """Whether a list such as `=eth0` (exactly), `eth` (a prefix) or `ib0,ib1` includes an
    interface.
    """
    listed = [each.strip().partition(":")[0] for each in chosen.split(",")]
    return f"={name}" in listed or name.startswith(tuple(filter(None, listed)))


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
        docs=f"{DOCS}#the-wrong-interface-or-address",
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
