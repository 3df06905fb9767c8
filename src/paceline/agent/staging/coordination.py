"""Stage on all nodes together: the head agent scans the data once for all, and nodes wait for each
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.rendezvous.errors import Interrupted
from paceline.agent.stop.received_signals import Requests
from paceline.contract.jsonl import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError, PacelineError
from paceline.staging.copy.progress import Progress
from paceline.staging.pack_store import Packs
from paceline.staging.request import StagingRequest
from paceline.staging.stager import ScannedItem, Stager, StagingThread

POLL_INTERVAL = 0.1  # seconds
CLEANUP_TIMEOUT = 900.0  # seconds that agents wait for each other to collect results

# Messages between agents: the head's plan, a node's result, the head's summary, and both ends of
# the cleanup.
PLAN, NODE_STAGED, ALL_STAGED = "staging_plan", "node_staged", "all_staged"
NODE_CLEAN, ALL_CLEAN = "node_clean", "all_clean"


@dataclass(frozen=True)
class StagingContext:
    """What staging uses of its agent."""

    run: RunFolder
    launch_spec: LaunchSpec
    placement: Placement
    environ: Mapping[str, str]
    rendezvous: Rendezvous
    requests: Requests
    job_start: JobStartFolder
    events: EventWriter
    say: Callable[[str], None]


class StagingCoordinator:
    """One agent's part in staging on all nodes. One agent per node is its copier."""

    def __init__(
        self,
        context: StagingContext,
        request: StagingRequest,
        *,
        is_copier: bool,
        make_stager: Callable[[], Stager],
    ) -> None:
        self.context, self.is_copier = context, is_copier
        self.thread: StagingThread | None = None
        self._make_stager = make_stager
        self._packs = Packs(request.packs)
        self._staged: set[int] = set()  # other agents that have staged
        self._progress = Progress(context.say)

    def stage(self, error: PacelineError | None) -> bool:
        """Stage here and wait for all nodes. Returns False after a stop request; an error names the
        node.

        `error` is what kept this node from starting, if anything did.
        """
        is_head = self.context.placement.is_head
        if is_head and error is None:
            self._start_thread()
        try:
            result = self._lead(error) if is_head else self._follow(error)
        finally:
            self.stop()
            self._progress.clear()
        if result.get("error"):
            raise LaunchError(str(result["error"]), hint=str(result.get("hint", "")))
        return not result.get("stopped")

    def stop(self) -> None:
        if self.thread is not None:
            self.thread.stop()

    def _start_thread(self, items: list[ScannedItem] | None = None) -> None:
        self.thread = StagingThread(self._make_stager(), items)
        self.thread.start()

    def _lead(self, error: PacelineError | None) -> dict[str, Any]:
        """On the head: tell the others what to stage, wait for all nodes, tell them the result."""
        others = self.context.placement.nodes - 1
        result = _error_fields(error)
        is_plan_sent = not others
        while not result:
            assert self.thread is not None
            thread = self.thread
            if (
                not is_plan_sent
                and thread.scanned.is_set()
                and (thread.is_done or self._has_packs(thread))
            ):
                result = self._send_plan(thread)
                is_plan_sent = True
            if self._is_stop_requested():
                result = {"stopped": True}
            for message in self._receive():
                self._staged.add(message["from"])
                result = result or _failure_fields(message)
            if thread.is_done and not result:
                result = {"stopped": True} if thread.stopped else _error_fields(thread.error)
                if not result and len(self._staged) >= others:
                    break
            if thread.stager.transfer.total:
                self._progress.show("staging data", thread.stager.transfer)
            time.sleep(POLL_INTERVAL)
        self.context.rendezvous.send({"kind": ALL_STAGED, **result})
        return result

    def _follow(self, error: PacelineError | None) -> dict[str, Any]:
        """On the others: stage what the head plans, if this is the node's copier, and wait for all
        nodes.
        """
        is_reported = False
        while True:
            for message in self._receive():
                if message["kind"] == ALL_STAGED:
                    return message
                if self.is_copier and self.thread is None and error is None:
                    error = self._start_planned(message)
            if not is_reported and (result := self._result(error)):
                self.context.rendezvous.send({"kind": NODE_STAGED, **result}, to=0)
                is_reported = True
            if self._is_stop_requested() and not is_reported:
                self.context.rendezvous.send({"kind": NODE_STAGED, "stopped": True}, to=0)
                is_reported = True
            time.sleep(POLL_INTERVAL)

    def _start_planned(self, plan: dict[str, Any]) -> PacelineError | None:
        try:
            items = [
                ScannedItem(item["name"], *self._packs.read(item["key"])) for item in plan["items"]
            ]
        except PacelineError as error:
            return error
        self._start_thread(items)
        return None

    def _result(self, error: PacelineError | None) -> dict[str, Any]:
        """Return this node's result for the head; empty as long as there is none."""
        if error is not None or self.thread is None or not self.thread.is_done:
            return _error_fields(error)
        if self.thread.stopped:
            return {"stopped": True}
        return _error_fields(self.thread.error) or {"size": self.thread.stager.result.size}

    def _send_plan(self, thread: StagingThread) -> dict[str, Any]:
        """Publish the manifests as files, since they may be large, and send their keys. Returns an
        error, if any.
        """
        assert thread.items is not None
        try:
            for item in thread.items:
                if not self._packs.has(item.manifest.key):
                    self._packs.publish(item.manifest, {})
        except OSError as error:
            return {
                "error": f"Cannot write {self._packs.folder}: {error.strerror}.",
                "hint": "The nodes read what to stage from there.",
            }
        items = [{"name": item.name, "key": item.manifest.key} for item in thread.items]
        self.context.rendezvous.send({"kind": PLAN, "items": items})
        return {}

    def _has_packs(self, thread: StagingThread) -> bool:
        assert thread.items is not None
        manifests = [item.manifest for item in thread.items]
        return all(self._packs.has(manifest.key) for manifest in manifests if manifest.needs_pack)

    def _receive(self) -> list[dict[str, Any]]:
        """Return the messages about staging and leave the others alone; a lost agent is an
        error.
        """
        rendezvous = self.context.rendezvous
        ours: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        for message in rendezvous.poll():
            kind = message.get("kind")
            if kind in ("lost", "left"):
                index = message["index"] if kind == "lost" else message["from"]
                raise LaunchError(f"Lost {rendezvous.describe(index)} while staging data.")
            (ours if kind in (PLAN, NODE_STAGED, ALL_STAGED) else rest).append(message)
        if rest:
            rendezvous.put_back(rest)
        return ours

    def _is_stop_requested(self) -> bool:
        context = self.context
        if context.requests.end_now:
            raise Interrupted("Interrupted while staging data.")
        return context.requests.wants_stop or (
            context.placement.is_head and context.job_start.stop.exists()
        )

    def wait_for_cleanup(self) -> None:
        """Wait until all agents have collected and cleaned up: a scheduler may end all when one
        exits with an error.
        """
        placement, rendezvous = self.context.placement, self.context.rendezvous
        if placement.count == 1:
            return
        pending = set(range(1, placement.count)) if placement.is_head else {0}
        if not placement.is_head:
            rendezvous.send({"kind": NODE_CLEAN}, to=0)
        deadline = time.monotonic() + CLEANUP_TIMEOUT
        while (
            pending & rendezvous.present
            and time.monotonic() < deadline
            and not self.context.requests.end_now
        ):
            for message in rendezvous.poll():
                if message.get("kind") in (NODE_CLEAN, ALL_CLEAN):
                    pending.discard(message["from"])
            time.sleep(POLL_INTERVAL)
        if placement.is_head:
            rendezvous.send({"kind": ALL_CLEAN})


def _error_fields(error: PacelineError | None) -> dict[str, Any]:
    return {} if error is None else {"error": error.message, "hint": error.hint}


def _failure_fields(message: dict[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in ("error", "hint", "stopped") if message.get(key)}
