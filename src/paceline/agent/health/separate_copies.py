"""Warns if the ranks run the script independently, each as if there were no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers.started_ranks import Launch
from paceline.contract.heartbeat_file import ENDED_ALONE, SPAWNS_ALONE, TRAINS_ALONE
from paceline.contract.jsonl import EventWriter

REPORT = "independent"  # the kind of a member's message about its ranks
CHECK_INTERVAL = 1.0  # seconds
SPAWN_DELAY = 30.0  # seconds; a script may prepare data with mp.spawn before it forms its group
_ALONE = (TRAINS_ALONE, SPAWNS_ALONE, ENDED_ALONE)


class SeparateCopies:
    """One agent's part: a member reports when all of its ranks are alone, and the head agent warns
    once.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
        say: Callable[[str], None],
        events: EventWriter,
    ) -> None:
        self._launch, self._heartbeats, self._rendezvous = launch, heartbeats, rendezvous
        self._say, self._events = say, events
        self._spawns = launch.launch_spec.style == "spawn"
        self._local_ranks = [local_rank for _, local_rank in launch.ranks()][
            : 1 if self._spawns else None
        ]
        # those whose ranks are all alone -> what one of them does
        self._agents: dict[int, int] = {}
        self._last_check = 0.0
        self._alone_since: float | None = None
        self._reported = launch.launch_spec.world_size == 1

    def check(self) -> None:
        now = time.monotonic()
        if self._reported or now - self._last_check < CHECK_INTERVAL:
            return
        self._last_check = now
        placement = self._launch.placement
        found = [self._heartbeats.read_coordination(local_rank) for local_rank in self._local_ranks]
        if not all(coordination in _ALONE for coordination in found):
            self._alone_since = None
            self._agents.pop(0, None)
            return
        self._alone_since = self._alone_since or now
        if SPAWNS_ALONE not in found or now - self._alone_since >= SPAWN_DELAY:
            if placement.is_head:
                self._agents[0] = found[0]
            else:
                self._reported = True
                self._rendezvous.send({"kind": REPORT, "coordination": found[0]}, to=0)
        if len(self._agents) == placement.count:
            self._warn(self._agents.values())

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a member's report."""
        self._agents[int(message["from"])] = int(message["coordination"])

    def finish(self, found: Iterable[int]) -> None:
        """Warn at the end of a run that was too short, or did not train, if all of its ranks were
        alone.
        """
        listed = list(found)
        if not self._reported and listed and all(coordination in _ALONE for coordination in listed):
            self._warn(listed)

    def _warn(self, found: Iterable[int]) -> None:
        self._reported = True
        spec = self._launch.launch_spec
        processes = spec.nodes if self._spawns else spec.world_size
        self._events.write("independent", attempt=self._launch.attempt.number, processes=processes)
        for line in _lines(found, processes=processes, ranks=spec.world_size, style=spec.style):
            self._say(line)


def _lines(found: Iterable[int], *, processes: int, ranks: int, style: str) -> list[str]:
    if style == "spawn":
        count = "1 process runs" if processes == 1 else f"{processes} processes run"
        return [
            f"warning: {count} this script, not {ranks}: with --style spawn, a script starts its "
            "own ranks, and this "
            "one has started none",
            "call paceline.spawn or mp.spawn, or use --style fork and form a process group",
        ]
    if SPAWNS_ALONE in found:
        return [
            f"warning: apparently {processes} processes run this script independently, and each "
            "calls mp.spawn: the "
            f"training starts {processes} times",
            "use --style spawn, which starts the script once per node, or --nproc 1",
        ]
    return [
        f"warning: apparently {processes} processes run this script independently: "
        "none has formed a process group or read its rank",
        "use --nproc 1 to run it once, or let the ranks train together with paceline.session, or "
        "with "
        "torch.distributed.init_process_group and DistributedDataParallel",
    ]
