"""`paceline.session`: set up, hand over a `Run`, and leave cleanly whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.contract.heartbeat_file import FINISHED, READY, SAVED_AND_STOPPED
from paceline.contract.jsonl import EventWriter, LineWriter
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED
from paceline.runtime.boundary.boundary import Boundary
from paceline.runtime.boundary.checkpoint_schedule import CheckpointSchedule
from paceline.runtime.boundary.heartbeat import Heartbeat
from paceline.runtime.boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.boundary.out_of_memory import explain_out_of_memory
from paceline.runtime.boundary.profiler import ProfilerWindow
from paceline.runtime.boundary.stop import Pruned, Stopped
from paceline.runtime.boundary.stragglers import StragglerDetector
from paceline.runtime.data.randomness import seed_everything
from paceline.runtime.distributed import communication_check, placement
from paceline.runtime.distributed import device as devices
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.affinity import bind_to_device_cpus
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import ProgressBar
from paceline.runtime.metrics.report import TrialReporter
from paceline.runtime.paths import Paths
from paceline.runtime.run import Run
from paceline.runtime.settings import Params, Settings
from paceline.runtime.trackers.base import Tracker
from paceline.runtime.trackers.selection import Trackers, open_trackers
from paceline.runtime.trackers.thread import MetricsFile
from paceline.runtime.training.gradients import LOW, Gradients
from paceline.runtime.training.wrap import Wrapper

_open = False  # one session at a time: signals, group and beat are the process's


@dataclass
class _Made:
    """What set-up has made so far, so that leaving undoes exactly that."""

    run: Run
    group: groups.ProcessGroups
    boundary: Boundary
    lines: LineWriter
    trackers: Trackers


class session:
    """Identity, device, process group and signals for the body of a `with`; a clean exit always.

    When the ranks agree to stop (a time limit, a preemption), `run.steps` ends the body after the state is
    saved: nothing after the loop runs, and the process exits with code 0. An error on one rank leaves at once,
    without waiting for the others; their agent ends them. `sys.exit(0)` in the body is its end: the last state
    is saved, and a rank that comes there first waits for the others.

    All arguments are fields of `Settings`; what the command line says (`paceline run --precision bf16`) wins.
    `folder` is where metrics, events and checkpoints go when no agent has made a run folder. `trackers` get what
    is logged, too: "wandb", "tensorboard", or whatever has the three methods of a `Tracker`.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        deterministic: bool = False,
        precision: str = "fp32",
        backend: str | None = None,
        cpu: bool = False,
        timeout: float | None = None,
        profile: str | None = None,
        max_steps: int | None = None,
        save_every_steps: int | None = None,
        save_every_seconds: float | None = 300.0,
        keep_last: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        start_from: str | None = None,
        on_nonfinite: str = "stop",
        straggler_factor: float = 1.5,
        progress: bool = True,
        report: bool = True,
        folder: str | Path | None = None,
        trackers: Sequence[Tracker | str] = (),
    ) -> None:
        self._context = LaunchContext.read()
        given = Settings(
            seed=seed, deterministic=deterministic, precision=precision, backend=backend, cpu=cpu, timeout=timeout,
            profile=profile, max_steps=max_steps, save_every_steps=save_every_steps,
            save_every_seconds=save_every_seconds, keep_last=keep_last, keep_every=keep_every, best=best,
            start_from=start_from, on_nonfinite=on_nonfinite, straggler_factor=straggler_factor, progress=progress,
            report=report,
        )  # fmt: skip
        launch_spec = self._context.launch_spec
        self._settings = given.overridden(launch_spec.runtime if launch_spec else {}).checked()
        self._folder = self._context.folder
        if self._folder is None and folder is not None:
            self._folder = RunFolder(Path(folder))
        self._trackers = trackers
        self._began = time.perf_counter()
        self._made: _Made | None = None

    def __enter__(self) -> Run:
        global _open
        if _open:
            raise RuntimeError("a session is open already in this process: leave it before opening another")
        _open = True
        try:
            self._made = self._make()
            return self._made.run
        except BaseException:
            _open = False
            raise

    def _make(self) -> _Made:
        settings, context = self._settings, self._context
        identity = read_identity()
        placement.check_world_size(identity, context.launch_spec.world_size if context.launch_spec else None)
        heartbeat = Heartbeat(context.heartbeat_file, identity.local_rank)
        device = devices.choose_device(identity, cpu=settings.cpu)
        if settings.bind and context.launch_spec is not None:
            bind_to_device_cpus(device)
        store = groups.open_store(identity, timeout=settings.timeout)
        posts = placement.gather_placements(store, placement.local_placement(identity, device))
        if posts and settings.report:
            placement.print_placements(posts)
        group = self._form(identity, device, store)
        if settings.seed is not None:
            seed_everything(settings.seed, settings.deterministic)
        return self._assemble(identity, device, group, heartbeat, hosts=[post.host for post in posts])

    def _form(self, identity: Identity, device: torch.device, store: Any) -> groups.ProcessGroups:
        """The groups, formed and tried out. Of those that do not work none is waited for."""
        settings, launch_spec = self._settings, self._context.launch_spec
        backend = settings.backend or groups.default_backend(device)
        try:
            group = groups.init_process_groups(
                identity, device, store=store, backend=backend, timeout=settings.timeout
            )
        except RuntimeError as error:
            raise communication_check.problem(identity, backend, error, what="forming the group") from error
        try:
            if launch_spec is None or launch_spec.check:
                communication_check.check_communication(group, identity, device, timeout=settings.timeout)
        except BaseException:
            group.abandon()
            raise
        return group

    def _assemble(
        self,
        identity: Identity,
        device: torch.device,
        group: groups.ProcessGroups,
        heartbeat: Heartbeat,
        *,
        hosts: list[str],
    ) -> _Made:
        settings, rank = self._settings, identity.rank
        writes = self._folder if rank == 0 else None
        events = EventWriter(writes.events / "rank-0.jsonl" if writes else None)
        trackers = open_trackers(
            self._context,
            settings,
            identity,
            folder=self._folder,
            given=self._trackers,
            store=group.store,
        )
        lines = MetricsFile(writes.metrics if writes else None, trackers.common)
        low = torch.bfloat16 if settings.precision == "bf16" else None
        wrapper = Wrapper(device, identity.world_size, low_precision=low)
        assert settings.precision == "fp32" or settings.precision in LOW
        boundary = Boundary(
            group=group.control,
            heartbeat=heartbeat,
            events=events,
            metrics=Metrics(lines, group=group.control, rank=rank, own=trackers.own),
            loss_check=NonFiniteLossCheck(
                rank=rank, on=settings.on_nonfinite == "stop" and settings.precision != "fp16"
            ),
            checkpoint_schedule=CheckpointSchedule(settings, rank=rank, events=events),
            progress=ProgressBar(settings.progress and rank == 0),
            stragglers=StragglerDetector(
                lines,
                rank=rank,
                hosts=hosts,
                world_size=identity.world_size,
                factor=settings.straggler_factor,
                device=device,
            ),
            profiler=ProfilerWindow(
                settings.profile, folder=self._folder.path if self._folder else None, rank=rank
            ),
            sync_buffers=wrapper.sync_buffers,
        )
        boundary.tracker_ids = trackers.ids()
        boundary.signals.install()
        heartbeat.set_state(max(heartbeat.state, READY))
        run = Run(
            identity=identity,
            device=device,
            group=group,
            settings=settings,
            params=Params(self._context.launch_spec.params if self._context.launch_spec else {}),
            wrapper=wrapper,
            gradients=Gradients(
                wrapper, precision=settings.precision, world_size=identity.world_size,
                skip_nonfinite=settings.on_nonfinite == "skip",
            ),
            boundary=boundary,
            folder=self._folder,
            places=Paths.read(os.environ, self._folder),
            attempt=self._context.attempt,
            reports=TrialReporter(
                self._folder.path if self._folder else None,
                trial=self._context.launch_spec.trial if self._context.launch_spec else {},
                rank=rank,
            ),
            trackers=trackers,
        )  # fmt: skip
        trackers.start()
        return _Made(run, group, boundary, lines, trackers)

    # -- leaving ---------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _open
        made = self._made
        assert made is not None
        self._made = None
        try:
            if error is None or isinstance(error, Stopped) or _is_plain_exit(error):
                pruned = isinstance(error, Pruned)
                stopped = not pruned and (isinstance(error, Stopped) or made.boundary.stopping)
                self._leave_together(made, stopped=stopped, pruned=pruned)
            else:
                self._leave_alone(made)
        finally:
            _open = False
            made.boundary.signals.restore()
        if isinstance(error, Stopped):
            raise SystemExit(0) from None
        if error is not None:
            explained = explain_out_of_memory(error, step=made.run._current_step, device=made.run.device)
            if explained is not None:
                raise explained from error

    def _leave_together(self, made: _Made, *, stopped: bool, pruned: bool = False) -> None:
        """All ranks are here: collectives are fine, and nothing is left under way."""
        run, boundary = made.run, made.boundary
        try:
            boundary.finish()
            if not pruned:  # nobody will go on from there
                run._save_at_end()
            boundary.checkpoint_schedule.close(wait=True)
            run._close()
        except BaseException:
            self._leave_alone(made)
            raise
        if pruned:
            boundary.progress.close()
            run.print(f"paceline: pruned at step {run.step}", file=sys.stderr)
        self._tell_the_end(run, boundary, stopped)
        made.lines.close()
        boundary.events.close()
        made.group.close()
        boundary.heartbeat.set_state(SAVED_AND_STOPPED if stopped else FINISHED)
        boundary.heartbeat.close()
        made.trackers.close(STOPPED if stopped else DONE, urgent=stopped and boundary.signals.is_urgent)

    def _leave_alone(self, made: _Made) -> None:
        """This rank has failed. Nobody is waited for: no barrier, no collective, no destroying of groups."""
        boundary = made.boundary
        made.group.abandon()
        boundary.progress.close()
        boundary.metrics.finish_alone()
        boundary.checkpoint_schedule.close(wait=False)
        made.run._close()
        made.lines.close()
        boundary.events.close()
        made.trackers.close(FAILED)

    def _tell_the_end(self, run: Run, boundary: Boundary, stopped: bool) -> None:
        boundary.progress.close()
        seconds = time.perf_counter() - self._began
        launched = self._context.launch_spec is not None  # then the agent tells it
        if run.rank == 0 and self._settings.report and not stopped and not launched:
            steps = f", {run.step} steps" if run.step else ""
            print(f"paceline: done in {_duration(seconds)}{steps}", file=sys.stderr, flush=True)


def _is_plain_exit(error: BaseException) -> bool:
    """`sys.exit()` and `sys.exit(0)` say that all is done, as the end of the body does; any other code is a failure."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"
