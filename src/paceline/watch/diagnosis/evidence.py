"""What a run folder says about the run's newest start: its agents, its ranks and how they ended."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.contract.claims import find_holder
from paceline.contract.foreign_records import NUMBER, Fields, keep_valid, read_objects, read_text
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.launcher_variables import expand
from paceline.contract.run_folder import DONE
from paceline.contract.stacks import NodeAnswer, Stack, read_stack
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
    "host": str,
    "nodelist": str,
    "interfaces": dict,
    "cpus": int,
    "ranks": list,
    "python": str,
    "torch": str,
    "nccl": str,
    "paceline": str,
    "gpu_driver": str,
    "resolved": list,
    "interface": str,
    "answers": bool,
    "set": dict,
    "visible_gpus": int,
    "slurm_gpus": int,
    "lost_host": str,
}
OWN_LINE = re.compile(r"(slurmstepd|srun|slurmd|paceline|bash|/\S*(job|sbatch|slurm_script)\S*): ")
LOG_TAIL = 65536  # bytes


@dataclass(frozen=True)
class AgentEvidence:
    """One agent of the newest job start, and its events since it has arrived."""

    index: int
    events: list[Event]

    @property
    def node(self) -> Event:
        """What it said about its node before it joined."""
        return self.events[0]

    @property
    def host(self) -> str:
        return str(self.node.get("host", "?"))

    @property
    def joined(self) -> bool:
        return bool(self.last("started"))

    @property
    def interfaces(self) -> dict[str, str]:
        """Its interfaces and their addresses, without the loopback."""
        known = self.node.get("interfaces") or {}
        return {name: address for name, address in known.items() if name != "lo"}

    @property
    def addresses(self) -> str:
        shown = [f"{name} {each}" for name, each in self.interfaces.items()]
        more = f" + {len(shown) - 3} more" if len(shown) > 3 else ""
        return (", ".join(shown[:3]) + more) or "loopback only"

    @property
    def lost(self) -> list[str]:
        """The nodes whose agents it lost, in the newest attempt or before it began."""
        hosts = [str(each.get("host")) for each in self.events if each.get("event") == "lost"]
        early = self.last("failed").get("lost_host")
        return hosts or ([early] if early else [])

    def last(self, name: str) -> Event:
        """Return its newest event of this name; empty if there is none."""
        return next((each for each in reversed(self.events) if each.get("event") == name), {})


class Evidence:
    """All that is known about a run. `answers` are those of a live run's nodes."""

    def __init__(
        self, record: Record, answers: Sequence[NodeAnswer] = (), quotas: Sequence[Finding] = ()
    ) -> None:
        self.record, self.folder, self.answers = record, record.folder, answers
        self.quotas = [each for each in quotas if each.level != GOOD]
        self.now = time.time()
        self.attempt = next(reversed(self.folder.attempts()), None)
        self.failure = read_failure(self.attempt) if self.attempt else {}
        self.usage = [newest_samples(use) for use in read_node_usage(self.folder)]
        self.ranks: dict[int, list[RankSample]] = read_ranks(
            [*self.usage, *map(_as_usage, answers)]
        )
        self.batch_log = read_text(self.folder.slurm_log, LOG_TAIL)

    @property
    def is_live(self) -> bool:
        return not self.record.is_over and self.record.status not in ("queued", "held", "prepared")

    @cached_property
    def launch_spec(self) -> LaunchSpec | None:
        try:
            return LaunchSpec.from_json(read_text(self.folder.launch_spec))
        except ValueError:
            return None

    @cached_property
    def agents(self) -> dict[int, AgentEvidence]:
        """The agents of the newest job start."""
        found: dict[int, AgentEvidence] = {}
        for path in self.folder.events.glob("agent-*.jsonl"):
            index = path.stem.removeprefix("agent-")
            events = [keep_valid(each, AGENT_FIELDS) for each in read_objects(path)]
            starts = [number for number, each in enumerate(events) if each.get("event") == "node"]
            if index.isdigit() and starts:
                found[int(index)] = AgentEvidence(int(index), events[starts[-1] :])
        holder = find_holder(self.folder)
        nodes = sorted((each.node for each in found.values()), key=lambda node: node.get("time", 0))
        newest = holder.name if holder else (nodes or [{}])[-1].get("job_start")
        return {
            index: agent
            for index, agent in sorted(found.items())
            if agent.node.get("job_start") == newest
        }

    @property
    def expected(self) -> int:
        """How many agents the run has: one per node, or one per rank."""
        spec = self.launch_spec
        if spec is None:
            return len(self.agents)
        ranks = [len(agent.node.get("ranks") or []) for agent in self.agents.values()]
        per_rank = spec.style == "srun" or any(0 < each < spec.nproc for each in ranks)
        return spec.world_size if per_rank else spec.nodes

    @cached_property
    def stacks(self) -> dict[int, Stack]:
        """Where ranks are. Of a live run, those that were not written just now do not count."""
        found = {}
        for path in self.attempt.path.glob("stacks-*.txt") if self.attempt else ():
            rank = path.stem.removeprefix("stacks-")
            is_new = self.record.is_over or (rank.isdigit() and int(rank) in self.told("dumped"))
            if (
                rank.isdigit()
                and is_new
                and (stack := read_stack(read_text(path, LOG_TAIL))) is not None
            ):
                found[int(rank)] = stack
        return dict(sorted(found.items()))

    def told(self, key: str) -> set[int]:
        """Return the ranks that nodes have listed in their answers.

        `ranks`: all of a node. `dumped`: they have written their stacks. `changed`: their stacks
        differ from those a few seconds before. `busy`: they use CPU time, files or connections.
        `awake`: they do not only wait. `foreign`: they take SIGUSR2 for themselves, so they have
        no stacks.
        """
        lists: list[Any] = [each.answer.get(key) for each in self.answers]
        entries = [entry for each in lists if isinstance(each, list) for entry in each]
        ranks = [each[0] if isinstance(each, list) and each else each for each in entries]
        return {rank for rank in ranks if isinstance(rank, int)}

    def works(self, rank: int) -> bool:
        return rank in self.told("changed") | self.told("busy")

    def seconds_quiet(self) -> float | None:
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
        lines = [] if self.record.status == DONE else self.batch_log.splitlines()
        return [line for line in lines if OWN_LINE.match(line.strip())]

    def host_of_agent(self, index: int) -> str:
        """Return the node of an agent, whether or not it has arrived."""
        if index in self.agents:
            return self.agents[index].host
        lists = [str(agent.node.get("nodelist") or "") for agent in self.agents.values()]
        try:
            listed = expand(next(filter(None, lists), ""))
        except UsageError:
            listed = []
        position = index * (self.launch_spec.nodes if self.launch_spec else 1) // self.expected
        return listed[position] if position < len(listed) else f"number {position}"

    def host_of_rank(self, rank: int) -> str:
        hosts = (a.host for a in self.agents.values() if rank in (a.node.get("ranks") or []))
        return next(hosts, "?")


def _as_usage(answer: NodeAnswer) -> NodeUsage:
    """Return an answer as a sample of its node."""
    sample = clean_sample(answer.answer)
    return NodeUsage(-1, {"host": answer.host}, [sample] if "time" in sample else [])
