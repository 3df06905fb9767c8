"""Staging on all nodes of a run: one agent per node copies, and the head agent scans and packs for
all.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent.rendezvous.membership import Interrupted
from paceline.contract import env
from paceline.contract.files import find_own_folder, own_folder_name
from paceline.errors import LaunchError, PacelineError
from paceline.staging import cleanup
from paceline.staging.copy import Progress, Stopped, Transfer, remove_tree
from paceline.staging.packs import Packs
from paceline.staging.request import choose_base, read_request
from paceline.staging.stager import ScannedItem, Stager, StagingResult

if TYPE_CHECKING:
    from paceline.agent.agent import Agent

POLL_INTERVAL = 0.1  # seconds
CLEANUP_TIMEOUT = 900.0  # seconds that agents wait for each other to collect results

# Messages between agents: the head's plan, a node's result, the head's summary, and both ends of
# the cleanup.
PLAN, NODE_STAGED, ALL_STAGED = "staging_plan", "node_staged", "all_staged"
NODE_CLEAN, ALL_CLEAN = "node_clean", "all_clean"

Fields = dict[str, Any]


class NodeData:
    """The data folder of a node. All its agents know the path, but only one, the copier, makes and
    fills it.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.placement, self.rendezvous = agent.placement, agent.rendezvous
        environ, placement = agent.environ, agent.placement
        self.request = read_request(agent.launch_spec, environ)
        self.is_copier = 0 in placement.local_ranks
        name = f"node-{placement.node}" if placement.nodes > 1 else ""
        self.owner = cleanup.Owner(
            run=agent.launch_spec.run_id,
            job_start=agent.job_start.path.name,
            node=placement.node,
            host=placement.host,
            job=environ.get("SLURM_JOB_ID", ""),
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            staged=[item.name for item in self.request.items],
            collect=list(self.request.collect),
            destination=str(agent.run.collected / name),
            **cleanup.this_process(),
        )
        self.base = choose_base(self.request, environ)
        self.transfer = Transfer()
        self.stager: Stager | None = None
        self.staged: Future[StagingResult] | None = None

    @property
    def folder(self) -> Path:
        """This run's folder. Its name is certain once the copier has made the one it is in."""
        private = find_own_folder(self.base) or self.base / own_folder_name()
        return private / f"run-{self.owner.run}-{self.owner.job_start}-{self.owner.node}"

    @property
    def variables(self) -> dict[str, str]:
        return {env.DATA: str(self.folder / "data")}

    def stage_in(self) -> bool:
        """Stage data before the ranks start, and wait for all nodes. Returns False after a stop
        request; an error names the node.
        """
        started = time.monotonic()
        self.agent.events.write("staging", host=self.owner.host)
        # in a thread, so that the agent can keep listening
        with ThreadPoolExecutor(1, thread_name_prefix="staging") as pool:
            if self.placement.is_head:
                self.staged = pool.submit(self._stage)
            try:
                result = self._stage_together(pool)
            finally:
                self.transfer.stop.set()
        if result.get("error"):
            raise LaunchError(result["error"], hint=result["hint"])
        if self.stager is not None and not result.get("stopped"):
            self._report(self.stager, time.monotonic() - started)
        return not result.get("stopped")

    def _stage(self, plan: Fields | None = None) -> StagingResult:
        """Stage on this node what the head agent has planned; the head agent itself plans first."""
        cleanup.make_private_folder(self.base)
        removed = cleanup.remove_leftovers(
            self.base, self.agent.environ, job_start=self.owner.job_start
        )
        if removed:
            count, host = len(removed), self.owner.host
            self.agent.say(f"removed {count} folders that earlier runs left on {host}")
        cleanup.make_run_folder(self.folder, self.owner)
        items = None
        if plan is not None:
            packs = Packs(self.request.packs)
            items = [ScannedItem(name, packs.read(key)) for name, key in plan["items"]]
        self.stager = Stager(
            self.request,
            private=self.folder.parent,
            data=self.folder / "data",
            host=self.owner.host,
            transfer=self.transfer,
        )
        return self.stager.stage(items)

    def _stage_together(self, pool: ThreadPoolExecutor) -> Fields:
        """Return the result of all nodes: the first failure, or nothing.

        The head tells the others what to stage, they tell it their results, and it tells them when
        all have staged.
        """
        is_head, nodes = self.placement.is_head, self.placement.nodes
        results: list[Fields] = []  # of nodes, as the head knows them
        is_reported, is_plan_sent = False, nodes == 1
        progress = Progress("staging data", self.agent.say)
        while True:
            for message in self._receive():
                if message["kind"] == ALL_STAGED:
                    return message
                if message["kind"] == "failed":  # an error of that agent itself
                    raise LaunchError("Node {host}: {message}".format(**message["failure"]))
                if message["kind"] == NODE_STAGED:
                    results.append(message)
                elif self.is_copier and self.staged is None:
                    self.staged = pool.submit(self._stage, message)
            if is_head:
                progress.show(self.transfer)
            stager = self.stager
            if not is_plan_sent and is_head and stager is not None and stager.prepared.is_set():
                # their contents are in files, since they may be large
                keys = [(item.name, item.manifest.key) for item in stager.items]
                self.rendezvous.send({"kind": PLAN, "items": keys})
                is_plan_sent = True
            if not is_reported and (result := self._find_result()) is not None:
                is_reported = True
                results.append(result)
                if not is_head:
                    self.rendezvous.send({**result, "kind": NODE_STAGED}, to=0)
            failure = next((each for each in results if "error" in each or "stopped" in each), None)
            if is_head and (failure is not None or len(results) == nodes):
                self.rendezvous.send({**(failure or {}), "kind": ALL_STAGED})
                return failure or {}
            time.sleep(POLL_INTERVAL)

    def _find_result(self) -> Fields | None:
        """Return this node's result; None as long as there is none."""
        requests = self.agent.requests
        if requests.end_now:
            raise Interrupted("Interrupted while staging data.")
        is_done = self.staged is not None and self.staged.done()
        failure = self.staged.exception() if self.staged is not None and is_done else None
        is_requested = self.placement.is_head and self.agent.job_start.stop.exists()
        if is_requested or requests.wants_stop or isinstance(failure, Stopped):
            return {"stopped": True}
        if isinstance(failure, PacelineError):
            return {"error": failure.message, "hint": failure.hint}
        if failure is not None:
            return {"error": f"Staging failed: {type(failure).__name__}: {failure}.", "hint": ""}
        return {} if is_done else None

    def _receive(self) -> list[Fields]:
        """Return the messages about staging and leave the others alone; a lost agent is an
        error.
        """
        messages = self.rendezvous.poll()
        for message in messages:
            if message["kind"] in ("lost", "left"):
                index = message["index" if message["kind"] == "lost" else "from"]
                raise LaunchError(f"Lost {self.rendezvous.describe(index)} while staging data.")
        kinds = (PLAN, NODE_STAGED, ALL_STAGED, "failed")
        self.rendezvous.put_back([each for each in messages if each["kind"] not in kinds])
        return [each for each in messages if each["kind"] in kinds]

    def _report(self, stager: Stager, seconds: float) -> None:
        agent, result = self.agent, stager.result
        agent.events.write(
            "staged",
            host=self.owner.host,
            files=result.files,
            size=result.size,
            reused=result.reused,
            seconds=seconds,
        )
        if self.placement.is_head:
            for note in result.notes:
                agent.say(note)
            summary = result.summary(seconds)
            agent.say(f"data staged to {stager.data} in {seconds:.1f} s: {summary}")

    def stage_out(self) -> None:
        """Collect results after the last rank has ended, clean up, and wait for the other nodes."""
        is_kept = False
        try:
            if self.is_copier and self.request.collect and self.folder.is_dir():
                is_kept = not self._collect()
        finally:
            if self.stager is not None:
                self.stager.close()
            if is_kept:
                self.agent.warn(
                    f"{self.folder} on {self.owner.host} keeps the results: your next run there, "
                    "or `paceline clean`, tries again"
                )
            elif self.is_copier and self.folder.is_dir() and not remove_tree(self.folder):
                self.agent.warn(f"cannot remove all of {self.folder}")
            self._wait_for_cleanup()

    def _collect(self) -> bool:
        """Return whether all results are collected."""
        agent, owner = self.agent, self.owner
        result = cleanup.collect_results(self.folder, owner)
        files, size = len(result.sizes), sum(result.sizes)
        agent.events.write("collected", host=owner.host, files=files, size=size)
        for line in result.describe(owner.host, owner.destination):
            agent.say(line)
        if not result.problems:
            with suppress(OSError):
                cleanup.write_owner(self.folder, replace(owner, collected=True))
        return not result.problems

    def _wait_for_cleanup(self) -> None:
        """Wait until all agents have collected and cleaned up: a scheduler may end all when one
        exits with an error.
        """
        is_head = self.placement.is_head
        if not is_head:
            self.rendezvous.send({"kind": NODE_CLEAN}, to=0)
        self.rendezvous.gather(
            NODE_CLEAN if is_head else ALL_CLEAN,
            set(range(1, self.placement.count)) if is_head else {0},
            timeout=CLEANUP_TIMEOUT,
            ended=lambda: self.agent.requests.end_now,
        )
        if is_head:
            self.rendezvous.send({"kind": ALL_CLEAN})
