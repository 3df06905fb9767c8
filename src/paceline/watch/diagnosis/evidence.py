"""What a run folder says about the run's newest start: its agents, its ranks and how they ended."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.claims import find_holder
from paceline.contract.foreign_records import NUMBER, Fields, keep_valid, read_bounded, read_objects
from paceline.contract.foreign_records import read_tail as read_end
from paceline.contract.hostlist import expand
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.contract.stacks import NodeAnswer, Stack, read_stack
from paceline.contract.verdict import DONE
from paceline.errors import UsageError
from paceline.spec.findings import GOOD, Finding
from paceline.watch.failure import read_failure
from paceline.watch.node_usage import (
    NodeUsage,
    RankSample,
    clean_sample,
    newest_samples,
    read_node_usage,
    read_ranks,
)
from paceline.watch.records import Record

Event = dict[str, Any]

AGENT_FIELDS: Fields = {
    "time": NUMBER,
    "event": str,
    "job_start": str,
    "index": int,
    "host": str,
    "nodelist": str,
    "interfaces": dict,
    "addresses": list,
    "cpus": int,
    "ranks": list,
    "python": str,
    "torch": str,
    "nccl": str,
    "paceline": str,
    "gpu_driver": str,
    "address": str,
    "error": str,
    "resolved": list,
    "interface": str,
    "answers": bool,
    "peer": str,
    "chosen": dict,
    "set": dict,
    "closed": bool,
    "reason": str,
    "visible_gpus": int,
    "slurm_gpus": int,
    "gpu_devices": int,
    "run_free": int,
    "tmp_free": int,
    "shm_free": int,
    "memory_free": int,
    "attempt": int,
    "lost_host": str,
}
FAILURE_FIELDS: Fields = {"traceback": str, "step": int, "time": NUMBER, "log": str}
OWN_LINE = re.compile(r"(slurmstepd|srun|slurmd|paceline|bash|/\S*(job|sbatch|slurm_script)\S*): ")
LOG_TAIL = 65536  # bytes
STRAGGLER_AGE = 400.0  # seconds after which a report of a slow rank is history


@dataclass(frozen=True)
class AgentEvidence:
    """One agent of the newest job start."""

    index: int
    node: Event  # what it said about its node before it joined
    joined: bool
    unreachable: Event | None  # why it could not join the head agent
    network: Event | None  # of its newest attempt
    lost: list[Event]  # the agents that it lost
    failed: Event | None  # its own error

    @property
    def host(self) -> str:
        return str(self.node.get("host", "?"))

    @property
    def addresses(self) -> str:
        """Its interfaces and their addresses, without the loopback."""
        known = self.node.get("interfaces") or {}
        return (
            ", ".join(f"{name} {address}" for name, address in known.items() if name != "lo")
            or "loopback only"
        )

    @property
    def address(self) -> str:
        """The interface that leads to the other nodes, or else the first one, and how many others
        there are.
        """
        known = self.node.get("interfaces") or {}
        others = {name: each for name, each in known.items() if name != "lo"}
        if not others:
            return "loopback only"
        route = (self.network or {}).get("interface")
        name = route if route in others else next(iter(others))
        return f"{name} {others[name]}" + f" + {len(others) - 1} more" * (len(others) > 1)


@dataclass(frozen=True)
class Motion:
    """Ranks, as `agent.health.node_probe` describes them."""

    present: frozenset[int]  # those whose nodes have answered
    dumped: frozenset[int]  # have written their stacks
    changed: frozenset[int]  # their stacks differ from those a few seconds before
    busy: frozenset[int]  # use CPU time, files or connections
    awake: frozenset[int]  # do not only wait
    foreign: frozenset[int]  # take SIGUSR2 for themselves, so they have no stacks

    def works(self, rank: int) -> bool:
        return rank in self.changed or rank in self.busy

    def passes(self, rank: int) -> bool:
        """Whether a rank that waits for others gets on every now and then."""
        return rank in self.changed or rank in self.awake


def read_motion(answers: Sequence[NodeAnswer]) -> Motion:
    def listed(key: str) -> list[Any]:
        lists: list[Any] = [each.answer.get(key) for each in answers]
        return [entry for each in lists if isinstance(each, list) for entry in each]

    first = [row[0] for row in listed("ranks") if isinstance(row, list) and row]
    keys = ("dumped", "changed", "busy", "awake", "foreign")
    return Motion(
        *(
            frozenset(rank for rank in ranks if isinstance(rank, int))
            for ranks in (first, *map(listed, keys))
        )
    )


@dataclass(frozen=True)
class Evidence:
    """All that is known about a run."""

    record: Record
    launch_spec: LaunchSpec | None
    agents: dict[int, AgentEvidence]
    expected: int  # agents
    nodes: list[str]  # as the scheduler lists them
    attempt: AttemptFolder | None
    failure: dict[str, Any]
    stacks: dict[int, Stack]
    usage: list[NodeUsage]
    ranks: dict[int, list[RankSample]]
    answers: list[NodeAnswer]  # of the nodes of a live run
    save_errors: list[Event]
    has_saved_since: bool  # since the last of these errors
    stragglers: dict[int, float]  # ranks, and how much slower they are, as rank 0 reported last
    motion: Motion  # of the ranks of a live run
    quotas: list[Finding]  # of the run's disk, where they are not good
    log: str  # the end of the log of the rank that failed
    batch_log: str  # the end of the batch script's
    now: float = field(default_factory=time.time)

    @property
    def folder(self) -> RunFolder:
        return self.record.folder

    @property
    def is_live(self) -> bool:
        return not self.record.is_over and self.record.status not in ("queued", "held", "prepared")

    def seconds_silent(self) -> float | None:
        """Return how long ago a rank of the newest attempt has printed anything; None if none
        has.
        """
        printed = self.attempt.last_output() if self.attempt is not None else None
        return max(0.0, self.now - printed) if printed is not None else None

    def own_lines(self) -> list[str]:
        """Return what Slurm, the shell and Paceline have written to the log of a run that is not
        done.

        The script's output is there too, and may say anything.
        """
        if self.record.status == DONE:
            return []
        return [line for line in self.batch_log.splitlines() if OWN_LINE.match(line.strip())]

    def host_of_agent(self, index: int) -> str:
        """Return the node of an agent, whether or not it has arrived."""
        if index in self.agents:
            return self.agents[index].host
        nodes = self.launch_spec.nodes if self.launch_spec else 1
        position = index * nodes // max(1, self.expected)
        return self.nodes[position] if position < len(self.nodes) else f"number {position}"

    def host_of_rank(self, rank: int) -> str:
        for agent in self.agents.values():
            if rank in (agent.node.get("ranks") or []):
                return agent.host
        return "?"


def read_evidence(
    record: Record, answers: Sequence[NodeAnswer] = (), quotas: Sequence[Finding] = ()
) -> Evidence:
    """Read the run folder. `answers` are those of a live run's nodes."""
    folder = record.folder
    try:
        launch_spec = LaunchSpec.from_json(read_bounded(folder.launch_spec).decode())
    except (OSError, ValueError):
        launch_spec = None
    agents = _read_agents(folder)
    attempt = next(reversed(folder.attempts()), None)
    motion = read_motion(answers)
    stacks = _read_stacks(attempt) if attempt else {}
    if not record.is_over:  # those that were not written just now are of another moment
        stacks = {rank: stack for rank, stack in stacks.items() if rank in motion.dumped}
    failure = keep_valid(read_failure(attempt), FAILURE_FIELDS) if attempt else {}
    rank = failure.get("rank")
    usage = [newest_samples(use) for use in read_node_usage(folder)]
    lists = [str(agent.node.get("nodelist") or "") for agent in agents.values()]
    listed = next(filter(None, lists), record.state.nodes if record.state else "")
    saves = [each for each in record.events if each["event"] in ("saved", "save_failed")]
    errors = [each for each in saves if each["event"] == "save_failed"]
    return Evidence(
        record=record,
        launch_spec=launch_spec,
        agents=agents,
        expected=_agent_count(launch_spec, agents),
        nodes=_expand(listed),
        attempt=attempt,
        failure=failure,
        stacks=stacks,
        usage=usage,
        ranks=read_ranks([*usage, *map(_as_usage, answers)]),
        answers=list(answers),
        save_errors=errors,
        has_saved_since=bool(errors) and saves[-1]["event"] == "saved",
        stragglers=_read_stragglers(folder, usage),
        motion=motion,
        quotas=[each for each in quotas if each.level != GOOD],
        log=_tail(attempt.log(rank)) if attempt and isinstance(rank, int) else "",
        batch_log=_tail(folder.slurm_log),
    )


def _agent_count(launch_spec: LaunchSpec | None, agents: Mapping[int, AgentEvidence]) -> int:
    """Return how many agents the run has: one per node, or one per rank."""
    if launch_spec is None:
        return len(agents)
    per_rank = launch_spec.style == "srun" or any(
        0 < len(agent.node.get("ranks") or []) < launch_spec.nproc for agent in agents.values()
    )
    return launch_spec.world_size if per_rank else launch_spec.nodes


def _read_agents(folder: RunFolder) -> dict[int, AgentEvidence]:
    """Return the agents of the newest job start, each with its events since it has arrived."""
    found: dict[int, list[Event]] = {}
    for path in folder.events.glob("agent-*.jsonl"):
        index = path.stem.removeprefix("agent-")
        events = [_clean(each) for each in read_objects(path)]
        starts = [number for number, each in enumerate(events) if each.get("event") == "node"]
        if index.isdigit() and starts:
            found[int(index)] = events[starts[-1] :]
    holder = find_holder(folder)
    starts_by_time = sorted(
        (each[0] for each in found.values()), key=lambda each: float(each.get("time", 0))
    )
    newest = holder.name if holder else (starts_by_time or [{}])[-1].get("job_start")
    return {
        index: _agent(index, events)
        for index, events in sorted(found.items())
        if events[0].get("job_start") == newest
    }


def _clean(line: Event) -> Event:
    """Return an event whose values have the types that we expect, and those inside them too."""
    event = keep_valid(line, AGENT_FIELDS)
    for key in ("interfaces", "set", "chosen"):
        if key in event:
            event[key] = {name: text for name, text in event[key].items() if isinstance(text, str)}
    if "ranks" in event:
        event["ranks"] = [rank for rank in event["ranks"] if isinstance(rank, int)]
    return event


def _agent(index: int, events: list[Event]) -> AgentEvidence:
    def last(name: str) -> Event | None:
        return next((event for event in reversed(events) if event.get("event") == name), None)

    failed = last("failed")
    return AgentEvidence(
        index,
        events[0],
        joined=last("started") is not None,
        unreachable=last("unreachable"),
        network=last("network"),
        lost=[event for event in events if event.get("event") == "lost"],
        failed=failed if failed and failed.get("reason") else None,
    )


def _expand(text: str) -> list[str]:
    try:
        return expand(text)
    except UsageError:
        return []


def _read_stacks(attempt: AttemptFolder) -> dict[int, Stack]:
    found = {}
    for path in attempt.path.glob("stacks-*.txt"):
        number = path.stem.removeprefix("stacks-")
        stack = read_stack(_tail(path)) if number.isdigit() else None
        if stack is not None:
            found[int(number)] = stack
    return dict(sorted(found.items()))


def _as_usage(answer: NodeAnswer) -> NodeUsage:
    """Return an answer as a sample of its node."""
    sample = clean_sample(answer.answer)
    samples = [sample] if "time" in sample else []
    return NodeUsage(-1, {"host": answer.host}, samples)


def _read_stragglers(folder: RunFolder, usage: list[NodeUsage]) -> dict[int, float]:
    """Return the ranks that rank 0 has called slow, in the newest start of the run."""
    began = min((float(use.details.get("time", 0)) for use in usage), default=0.0)
    found: dict[int, float] = {}
    newest = reported = 0.0
    for line in read_objects(folder.metrics, limit=1 << 20):
        ratios, when = line.get("stragglers"), line.get("time")
        newest = max(newest, float(when)) if isinstance(when, NUMBER) else newest
        if isinstance(ratios, dict) and isinstance(when, NUMBER) and when >= began:
            valid = {
                rank: ratio
                for rank, ratio in ratios.items()
                if rank.isdigit() and isinstance(ratio, NUMBER)
            }
            found |= {int(rank): float(ratio) for rank, ratio in valid.items()}
            reported = float(when)
    # It is reported again every five minutes, as long as it is slow.
    return found if newest - reported < STRAGGLER_AGE else {}


def _tail(path: Any) -> str:
    try:
        return read_end(path, LOG_TAIL).decode(errors="replace")
    except OSError:
        return ""
