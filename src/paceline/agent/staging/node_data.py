"""The data of a node: an agent stages it in before the ranks start, and collects results after
they have ended.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.agent.staging.coordination import StagingContext, StagingCoordinator
from paceline.contract import env
from paceline.contract.claims import claim_number
from paceline.errors import LaunchError, PacelineError
from paceline.staging import folders, leftovers
from paceline.staging.collect import Collection
from paceline.staging.copy.transfer import Stopped, Transfer
from paceline.staging.folders import Owner, format_size
from paceline.staging.request import read_request
from paceline.staging.stager import Stager, scan_notes


class NodeData:
    """The data folder of a node. All its agents know the path, but only one, the copier, makes and
    fills it.
    """

    def __init__(self, context: StagingContext) -> None:
        self.context = context
        placement, environ = context.placement, context.environ
        self.request = read_request(context.launch_spec, environ)
        self.is_copier = 0 in placement.local_ranks
        name = f"node-{placement.node}" if placement.nodes > 1 else ""
        self.owner = Owner(
            run=context.launch_spec.run_id,
            job_start=context.job_start.path.name,
            node=placement.node,
            host=placement.host,
            job=environ.get("SLURM_JOB_ID", ""),
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            staged=[item.name for item in self.request.items],
            collect=list(self.request.collect),
            destination=str(context.run.collected / name),
            claim=claim_number(context.run, context.job_start.path.name),
            **folders.this_process(),
        )
        self.base = folders.choose_base(self.request, environ)
        self.coordinator = StagingCoordinator(
            context, self.request, is_copier=self.is_copier, make_stager=self._make_stager
        )

    @property
    def private(self) -> Path:
        """The user's folder on this node. Its name is certain once the copier has made it."""
        return folders.private_path(self.base)

    @property
    def folder(self) -> Path:
        return folders.run_folder_path(self.private, self.owner)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def variables(self) -> dict[str, str]:
        return {env.DATA: str(self.data)}

    # -- in
    # --------------------------------------------------------------------------------------------

    def stage_in(self) -> bool:
        """Stage data before the ranks start. Returns False after a stop request; an error names
        the node.
        """
        started = time.monotonic()
        error = self._make_folders() if self.is_copier else None
        self.context.events.write("staging", host=self.context.placement.host)
        if not self.coordinator.stage(error):
            return False
        self._report(time.monotonic() - started)
        return True

    def _make_folders(self) -> PacelineError | None:
        try:
            folders.make_private_folder(self.base)
            removed = leftovers.remove_leftovers(
                self.base, self.context.environ, job_start=self.owner.job_start
            )
            if removed:
                self.context.say(
                    f"removed {len(removed)} folders that earlier runs left on {self.owner.host}"
                )
            folders.make_run_folder(self.folder, self.owner)
        except PacelineError as error:
            return error
        except OSError as error:
            return LaunchError(
                f"Node {self.owner.host}: cannot create {self.folder}: {error.strerror}."
            )
        return None

    def _make_stager(self) -> Stager:
        return Stager(
            self.request,
            private=self.private,
            data=self.data,
            host=self.owner.host,
            makes_packs=self.context.placement.is_head,
        )

    def _report(self, seconds: float) -> None:
        context, thread = self.context, self.coordinator.thread
        if thread is None:
            return
        result = thread.stager.result
        context.events.write(
            "staged",
            host=context.placement.host,
            files=result.files,
            size=result.size,
            reused=result.reused,
            seconds=seconds,
        )
        if not context.placement.is_head:
            return
        for note in [*scan_notes(thread.items or []), *result.notes]:
            context.say(note)
        rate = f", {format_size(result.size / seconds)}/s" if result.size and seconds else ""
        copied = f"{result.files} files ({format_size(result.size)}{rate}) copied"
        reused = f"{format_size(result.reused)} reused"
        parts = ", ".join(
            part for part, count in ((copied, result.files), (reused, result.reused)) if count
        )
        context.say(f"data staged to {self.data} in {seconds:.1f} s: {parts or 'nothing'}")

    # -- out
    # -------------------------------------------------------------------------------------------

    def stage_out(self) -> None:
        """Collect results after the last rank has ended, clean up, and wait for the other nodes."""
        self.coordinator.stop()
        try:
            if self.is_copier and self.request.collect and self.folder.is_dir():
                self._collect()
        finally:
            if self.coordinator.thread is not None:
                for lock in self.coordinator.thread.stager.locks:
                    lock.close()
            if self.is_copier and self.folder.is_dir() and not folders.remove_tree(self.folder):
                self.context.say(f"warning: cannot remove all of {self.folder}")
            self.coordinator.wait_for_cleanup()

    def _collect(self) -> None:
        say, host, destination = self.context.say, self.owner.host, self.owner.destination
        collection = Collection(
            self.data,
            Path(destination),
            patterns=self.request.collect,
            staged=self.owner.staged,
            claim=self.owner.claim,
        )
        try:
            result = collection.run(Transfer())
        except (OSError, Stopped) as error:
            say(f"warning: cannot collect results on {host}: {error}")
            return
        for problem in result.problems[:5]:
            say(f"warning: cannot collect a result on {host}: {problem}")
        if result.outdated:
            say(f"left {result.outdated} results on {host}: the run folder has newer ones")
        self.context.events.write(
            "collected", host=self.context.placement.host, files=result.files, size=result.size
        )
        if result.files:
            say(
                f"collected {result.files} files ({format_size(result.size)}) from {host}: "
                f"{destination}"
            )
        with suppress(OSError):
            folders.write_owner(self.folder, replace(self.owner, collected=True))
