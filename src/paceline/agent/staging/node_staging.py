"""What a agent does about data: one copier per node brings it in before the ranks start, and takes results out
after they have ended. The head looks at the data once and tells the others; all begin together, and leave together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent.placement import Placement
from paceline.agent.rendezvous.errors import Interrupted
from paceline.agent.rendezvous.rendezvous import Rendezvous
from paceline.agent.signals import Requests
from paceline.agent.staging import cleanup, folders
from paceline.agent.staging.collect import Collection
from paceline.agent.staging.copy.progress import Progress
from paceline.agent.staging.copy.transfer import Stopped, Transfer
from paceline.agent.staging.folders import Owner, format_size
from paceline.agent.staging.packs import Packs
from paceline.agent.staging.request import read_request
from paceline.agent.staging.stage import ScannedItem, Stager, Worker, notes_on
from paceline.contract import env
from paceline.contract.jsonl import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError, PacelineError

LOOK_EVERY = 0.1  # seconds between looks at the worker, the others and the requests
LEAVE_WITHIN = 900.0  # seconds that agents wait for each other to have brought their results back


@dataclass(frozen=True)
class StagingContext:
    """What a agent has already."""

    run: RunFolder
    launch_spec: LaunchSpec
    placement: Placement
    environ: Mapping[str, str]
    rendezvous: Rendezvous
    requests: Requests
    job_start: JobStartFolder
    events: EventWriter
    say: Callable[[str], None]


class NodeStaging:
    def __init__(self, around: StagingContext) -> None:
        self.around = around
        placement, environ = around.placement, around.environ
        self.wish = read_request(around.launch_spec, environ)
        self.is_copier = 0 in placement.local_ranks
        name = f"node-{placement.node}" if placement.nodes > 1 else ""
        self.owner = Owner(
            run=around.launch_spec.run_id, job_start=around.job_start.path.name, node=placement.node,
            host=placement.host,
            job=environ.get("SLURM_JOB_ID", ""), cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            staged=[item.name for item in self.wish.items], collect=list(self.wish.collect),
            destination=str(around.run.collected / name), **folders.this_process(),
        )  # fmt: skip
        # All agents of a node come to the same path; only the copier makes it.
        self.private = folders.choose_base(self.wish, environ) / f"paceline-{os.geteuid()}"
        self.folder = folders.run_folder(self.private, self.owner)
        self.worker: Worker | None = None
        self._told: dict[int, dict[str, Any]] = {}  # what the copiers of other nodes said
        self._line = Progress(around.say)

    @property
    def variables(self) -> dict[str, str]:
        return {env.DATA: str(self.folder / "data")}

    # -- in --------------------------------------------------------------------------------------------

    def stage_in(self) -> bool:
        """Before the ranks start. False when a stop was asked for meanwhile; an error names the node."""
        began = time.monotonic()
        around = self.around
        problem = self._make_folders() if self.is_copier else None
        around.events.write("staging", host=around.placement.host)
        if around.placement.is_head and problem is None:
            self.worker = Worker(self._stager())
            self.worker.start()
        try:
            result = self._lead(problem) if around.placement.is_head else self._follow(problem)
        finally:
            if self.worker is not None:
                self.worker.end()
            self._line.clear()
        if result.get("problem"):
            raise LaunchError(str(result["problem"]), hint=str(result.get("hint", "")))
        if result.get("stopped"):
            return False
        self._report(time.monotonic() - began)
        return True

    def _make_folders(self) -> PacelineError | None:
        try:
            folders.private_folder(self.private.parent)
            removed = cleanup.remove_leftovers(
                self.private, self.around.environ, job_start=self.owner.job_start
            )
            if removed:
                self.around.say(
                    f"removed {len(removed)} folders that earlier runs had left on {self.owner.host}"
                )
            folders.make_run_folder(self.folder, self.owner)
        except PacelineError as problem:
            return problem
        except OSError as problem:
            return LaunchError(f"node {self.owner.host}: cannot make {self.folder}: {problem.strerror}")
        return None

    def _stager(self) -> Stager:
        return Stager(
            self.wish, private=self.private, data=self.folder / "data", host=self.owner.host,
            makes_packs=self.around.placement.is_head,
        )  # fmt: skip

    def _lead(self, problem: PacelineError | None) -> dict[str, Any]:
        """The head: tell the others what to stage, wait for all nodes, tell them that all is there."""
        around, others = self.around, self.around.placement.nodes - 1
        result = _told(problem)
        spoken = not others
        while not result:
            assert self.worker is not None
            worker = self.worker
            if worker.looked.is_set() and not spoken and (worker.is_done or self._packs_are_there(worker)):
                result = self._tell_plan(worker)
                spoken = True
            if self._asked_to_stop():
                result = {"stopped": True}
            for message in self._messages():
                self._told[message["from"]] = message
                result = result or _failed(message)
            if worker.is_done and not result:
                result = {"stopped": True} if worker.stopped else _told(worker.problem)
                if not result and len(self._told) >= others:
                    break
            self._show(worker)
            time.sleep(LOOK_EVERY)
        around.rendezvous.send({"kind": "data ready", **result})
        return result

    def _follow(self, problem: PacelineError | None) -> dict[str, Any]:
        """Others: stage what the head says, if this is the node's copier, and wait for all."""
        around, reported = self.around, False
        while True:
            for message in self._messages():
                if message["kind"] == "data ready":
                    return message
                if self.is_copier and self.worker is None and problem is None:
                    problem = self._begin(message)
            if not reported and (told := self._outcome(problem)):
                around.rendezvous.send({"kind": "staged", **told}, to=0)
                reported = True
            if self._asked_to_stop() and not reported:
                around.rendezvous.send({"kind": "staged", "stopped": True}, to=0)
                reported = True
            time.sleep(LOOK_EVERY)

    def _begin(self, message: dict[str, Any]) -> PacelineError | None:
        packs = Packs(self.wish.packs)
        try:
            planned = [ScannedItem(each["name"], *packs.read(each["key"])) for each in message["items"]]
        except PacelineError as problem:
            return problem
        self.worker = Worker(self._stager(), planned)
        self.worker.start()
        return None

    def _outcome(self, problem: PacelineError | None) -> dict[str, Any]:
        """What to tell the head; empty as long as there is nothing to tell."""
        if problem is not None or self.worker is None or not self.worker.is_done:
            return _told(problem)
        if self.worker.stopped:
            return {"stopped": True}
        return _told(self.worker.problem) or {"size": self.worker.stager.staged.size}

    def _tell_plan(self, worker: Worker) -> dict[str, Any]:
        """Manifests go by file: they may be large."""
        assert worker.planned is not None
        packs = Packs(self.wish.packs)
        try:
            for each in worker.planned:
                if not packs.is_packed(each.manifest.key):
                    packs.publish(each.manifest, {})
        except OSError as problem:
            return {
                "problem": f"cannot write {self.wish.packs}: {problem.strerror}",
                "hint": "the nodes read it there",
            }
        items = [{"name": each.name, "key": each.manifest.key} for each in worker.planned]
        self.around.rendezvous.send({"kind": "data plan", "items": items})
        return {}

    def _packs_are_there(self, worker: Worker) -> bool:
        assert worker.planned is not None
        packs = Packs(self.wish.packs)
        return all(
            packs.is_packed(each.manifest.key) for each in worker.planned if each.manifest.has_many_small
        )

    def _messages(self) -> list[dict[str, Any]]:
        """What concerns data; the rest is left for whom it concerns, but a lost agent ends the waiting."""
        rendezvous = self.around.rendezvous
        ours: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        for message in rendezvous.poll():
            kind = message.get("kind")
            if kind in ("lost", "left"):
                index = message["index"] if kind == "lost" else message["from"]
                raise LaunchError(f"{rendezvous.describe(index)} was lost while data was staged")
            (ours if kind in ("data plan", "data ready", "staged") else rest).append(message)
        if rest:
            rendezvous.put_back(rest)
        return ours

    def _asked_to_stop(self) -> bool:
        around = self.around
        if around.requests.end_now:
            raise Interrupted("interrupted while data was staged")
        return bool(around.requests.stop) or (around.placement.is_head and around.job_start.stop.exists())

    # -- words -----------------------------------------------------------------------------------------

    def _show(self, worker: Worker) -> None:
        copying = worker.stager.copying
        if copying.total:
            self._line.show("staging data", copying)

    def _report(self, seconds: float) -> None:
        around = self.around
        if self.worker is None:
            return
        staged = self.worker.stager.staged
        around.events.write(
            "staged", host=around.placement.host, files=staged.files, size=staged.size, reused=staged.reused,
            seconds=seconds,
        )  # fmt: skip
        if not around.placement.is_head:
            return
        for note in [*notes_on(self.worker.planned or []), *staged.notes]:
            around.say(note)
        rate = f", {format_size(staged.size / seconds)}/s" if staged.size and seconds else ""
        copied = f"{staged.files} files ({format_size(staged.size)}{rate}) copied"
        reused = f"{format_size(staged.reused)} reused"
        told = ", ".join(part for part, holds in ((copied, staged.files), (reused, staged.reused)) if holds)
        around.say(f"data staged in {seconds:.1f} s: {told or 'nothing'}; it is in {self.folder / 'data'}")

    # -- out -------------------------------------------------------------------------------------------

    def stage_out(self) -> None:
        """After the last rank: bring results back, wait for the other nodes to have done so, clean up."""
        if self.worker is not None:
            self.worker.end()
        try:
            if self.is_copier and self.wish.collect and self.folder.is_dir():
                self._collect()
        finally:
            if self.worker is not None:
                for lock in self.worker.stager.locks:
                    lock.close()
            if self.is_copier and self.folder.is_dir() and not folders.remove_tree(self.folder):
                self.around.say(f"warning: some of {self.folder} could not be removed")
            self._leave_together()

    def _collect(self) -> None:
        around = self.around
        copying = Transfer()
        try:
            found = Collection(
                self.folder / "data", Path(self.owner.destination), patterns=self.wish.collect,
                staged=self.owner.staged,
            ).carry_out(copying)  # fmt: skip
        except (OSError, Stopped) as problem:
            around.say(f"warning: results were not collected on {self.owner.host}: {problem}")
            return
        for each in found.problems[:5]:
            around.say(f"warning: a result was not collected on {self.owner.host}: {each}")
        if found.older:
            around.say(f"{found.older} results were left on {self.owner.host}: newer ones are there already")
        around.events.write("collected", host=around.placement.host, files=found.files, size=found.size)
        if found.files:
            what = f"{found.files} files ({format_size(found.size)})"
            around.say(f"collected {what} from {self.owner.host}: {self.owner.destination}")
        with suppress(OSError):
            folders.write_owner(self.folder, replace(self.owner, collected=True))

    def _leave_together(self) -> None:
        """A scheduler may end all agents when one exits with an error: nobody goes before all have
        collected and cleaned up."""
        placement, rendezvous = self.around.placement, self.around.rendezvous
        if placement.count == 1:
            return
        waiting_for = set(range(1, placement.count)) if placement.is_head else {0}
        if not placement.is_head:
            rendezvous.send({"kind": "left data"}, to=0)
        deadline = time.monotonic() + LEAVE_WITHIN
        while (
            waiting_for & rendezvous.present
            and time.monotonic() < deadline
            and not self.around.requests.hurry
        ):
            for message in rendezvous.poll():
                if message.get("kind") in ("left data", "data over"):
                    waiting_for.discard(message["from"])
            time.sleep(LOOK_EVERY)
        if placement.is_head:
            rendezvous.send({"kind": "data over"})


def _told(problem: PacelineError | None) -> dict[str, Any]:
    return {} if problem is None else {"problem": problem.message, "hint": problem.hint}


def _failed(message: dict[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in ("problem", "hint", "stopped") if message.get(key)}
