"""`paceline.session`: set up, provide a `Run`, and exit cleanly whatever happens."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from paceline.contract import env, process
from paceline.contract.foreign_records import EventWriter
from paceline.contract.heartbeat_file import FINISHED, READY, SAVED_AND_STOPPED
from paceline.contract.run_folder import DONE, FAILED, STOPPED, RunFolder
from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.distributed import placement
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.distributed.mesh import RankMesh, resolve_sizes
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import ProgressBar
from paceline.runtime.metrics.report import TrialReporter
from paceline.runtime.metrics.throughput import Rates, peak_flops
from paceline.runtime.randomness import seed_everything
from paceline.runtime.run import Run
from paceline.runtime.settings import LaunchContext, Params, Settings
from paceline.runtime.step_boundary.boundary import Boundary, StartPhases
from paceline.runtime.step_boundary.checkpoint_schedule import CheckpointSchedule
from paceline.runtime.step_boundary.heartbeat import Heartbeat
from paceline.runtime.step_boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.step_boundary.stop_consensus import Completed, Pruned, Stopped
from paceline.runtime.step_boundary.stragglers import StragglerDetector
from paceline.runtime.trackers.base import Tracker
from paceline.runtime.trackers.threads import ForwardedMetrics, open_trackers
from paceline.runtime.training.gradients import AUTOCAST_DTYPES, Gradients
from paceline.runtime.training.replica_check import ReplicaCheck
from paceline.runtime.training.wrap import Wrapper

# one session at a time: signal handlers, process group and heartbeat belong to the process
_open = False


class session:
    """Open a training session: `with paceline.session(seed=0) as run:`.

    It finds this process's rank and device, creates the process group, installs the handlers for
    stop signals, and prints where each rank runs. Every rank opens it, and gets a `Run`. It works
    the same under `python`, torchrun, srun, mpirun, `paceline run` and `paceline submit`.

    When all ranks have agreed to stop (before a time limit, or at a preemption), `run.steps` saves
    and ends the body: nothing after the loop runs, and the process exits with code 0. An error on
    one rank leaves at once, without waiting for the others; their agent ends them. `sys.exit(0)`
    counts as the end of the body: the last state is saved, and a rank that gets there first waits
    for the others.

    Flags and `paceline.toml` override all arguments but `best`, `straggler_factor`, `progress`,
    `report`, `folder`,
    `trackers` and `mesh`.

    Args:
        seed: Seeds Python, NumPy and torch, and the loaders' order and augmentation. None leaves
        them alone. deterministic: Ask torch for deterministic algorithms.
        precision: What `run.autocast` computes in: "fp32", "bf16", or "fp16" with a gradient
        scaler. backend: The backend of the process group; by default what the device needs.
        cpu: Ignore GPUs.
        timeout: Seconds before a collective counts as failed; by default torch's own.
        max_steps: Stop training after this many steps in total.
        save_every_steps: Save every this many steps.
        save_every_seconds: Save when this many seconds have passed since the last save.
        keep_last: How many of the newest checkpoints to keep.
        keep_every: Also keep each checkpoint whose step is a multiple of this.
        best: Also keep the checkpoint with the best value of this metric: "loss:min", "reward:max",
        or a usual name
            alone, such as "val_loss" or "accuracy".
        start_from: Where a new run takes its weights from: another run's folder, a checkpoint, or a
        file
            (.safetensors, .pt, .pth, .bin). The optimizer, the schedule and the step start fresh.
        start_continue: With `start_from`, also continue with the optimizer, the schedule, the step
        and the epoch. start_strict: With `start_from`, require that everything fits. With False,
        load only what fits. on_nonfinite: What to do about a NaN or infinite loss: "stop" the run,
        "skip" the step (costs a device
            sync per update), or "ignore" it.
        straggler_factor: Report ranks whose own part of a step takes this many times the median. 0
        turns it off. replica_check: About every this many steps, and before each save, ranks
        compare a checksum of their parameters;
            a difference ends the run. 0 turns it off.
        progress: Show a progress bar on rank 0's terminal.
        report: Print where the ranks run, and how long the session took.
        folder: Where metrics, events and checkpoints go if no agent has created a run folder.
        trackers: Trackers that also get what is logged: "wandb", "tensorboard", or any
        `paceline.Tracker`. mesh: The device mesh for FSDP2 and tensor parallelism, such as
        {"shard": 4, "tensor": 2}; see `Run.wrap`.

    Raises:
        UsageError: A setting is invalid, or a session is already open in this process.
        DeviceError: Two ranks share a GPU, or this rank has none.
        RunError: The world size is not what the job asked for, or the ranks cannot communicate.
        EnvironmentProblem: The ranks cannot find each other.
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
        max_steps: int | None = None,
        save_every_steps: int | None = None,
        save_every_seconds: float | None = 300.0,
        keep_last: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        start_from: str | None = None,
        start_continue: bool = False,
        start_strict: bool = True,
        on_nonfinite: str = "stop",
        straggler_factor: float = 1.5,
        replica_check: int = 100,
        progress: bool = True,
        report: bool = True,
        folder: str | Path | None = None,
        trackers: Sequence[Tracker | str] = (),
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        self._context = LaunchContext.read()
        settings = Settings(
            seed=seed,
            deterministic=deterministic,
            precision=precision,
            backend=backend,
            cpu=cpu,
            timeout=timeout,
            max_steps=max_steps,
            save_every_steps=save_every_steps,
            save_every_seconds=save_every_seconds,
            keep_last=keep_last,
            keep_every=keep_every,
            best=best,
            start_from=start_from,
            start_continue=start_continue,
            start_strict=start_strict,
            on_nonfinite=on_nonfinite,
            straggler_factor=straggler_factor,
            replica_check=replica_check,
            progress=progress,
            report=report,
            mesh=mesh,
        )
        spec = self._context.launch_spec
        self._settings = settings.override(spec.runtime if spec else {}).validate()
        # the script may change its working directory later
        if self._settings.start_from is not None:
            self._settings = replace(
                self._settings, start_from=os.path.abspath(self._settings.start_from)
            )
        self._folder = self._context.folder
        if self._folder is None and folder is not None:
            self._folder = RunFolder(Path(folder).absolute())
        self._trackers = trackers
        self._start = time.perf_counter()
        self._run: Run | None = None  # while it is open
        # called by all ranks, after training that was not stopped
        self._at_end: Callable[[], None] | None = None

    def __enter__(self) -> Run:
        """Set the session up, together with all other ranks."""
        global _open
        if _open:
            raise UsageError(
                "A session is already open in this process.",
                hint="Leave it, or call run.end() after paceline.start.",
            )
        _open, process.failure_context = True, ""
        try:
            self._run = self._build()
            return self._run
        except BaseException:
            _open = False
            raise

    def _build(self) -> Run:
        """Find this rank and its peers, and build what the script works with."""
        settings, context, folder = self._settings, self._context, self._folder
        phases = StartPhases()
        identity = read_identity()
        spec, rank = context.launch_spec, identity.rank
        placement.check_world_size(identity, spec.world_size if spec else None)
        if settings.mesh is not None:
            # before anything is open that an error would leave open
            resolve_sizes(settings.mesh, identity.world_size)
        heartbeat = Heartbeat(context.heartbeat_file, identity.local_rank)
        heartbeat.mark_session()
        device = placement.choose_device(identity, cpu=settings.cpu)
        if settings.bind and spec is not None:
            placement.bind_to_device_cpus(device)
        group, hosts = self._connect(identity, device, phases)
        if settings.seed is not None:
            seed_everything(settings.seed, settings.deterministic)
        trackers = open_trackers(context, settings, identity, folder=folder, given=self._trackers)
        written = folder if rank == 0 else None  # rank 0 writes
        lines = ForwardedMetrics(written.metrics if written else None, trackers.common)
        events = EventWriter(written.rank_events if written else None)
        wrapper = Wrapper(
            device,
            identity.world_size,
            mesh=RankMesh(identity, device, group),
            low_precision=torch.bfloat16 if settings.precision == "bf16" else None,
            timeout=settings.timeout,
        )
        metrics = Metrics(
            lines,
            group=group.control,
            rank=rank,
            own=trackers.own,
            rates=_rates(settings, device, wrapper),
        )
        stop_on_nonfinite = settings.on_nonfinite == "stop" and settings.precision != "fp16"
        boundary = Boundary(
            group=group.control,
            heartbeat=heartbeat,
            events=events,
            metrics=metrics,
            loss_check=NonFiniteLossCheck(rank=rank, on=stop_on_nonfinite),
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
            replicas=ReplicaCheck(wrapper, group=group.control, every=settings.replica_check),
            sync_buffers=wrapper.sync_buffers,
            phases=phases,
        )
        boundary.signals.install()
        heartbeat.set_state(max(heartbeat.state, READY))
        run = Run(
            identity=identity,
            device=device,
            group=group,
            settings=settings,
            params=Params(spec.params if spec else {}),
            wrapper=wrapper,
            gradients=Gradients(
                wrapper,
                precision=settings.precision,
                world_size=identity.world_size,
                skip_nonfinite=settings.on_nonfinite == "skip",
            ),
            boundary=boundary,
            folder=folder,
            attempt=context.attempt,
            reporter=TrialReporter(
                folder.path if folder else None, trial=spec.trial if spec else {}, rank=rank
            ),
            trackers=trackers,
        )
        if settings.mesh is not None:
            run._set_mesh(settings.mesh)
        if env.PROOF in os.environ:
            from paceline.runtime.proof.patches import attach_recorder

            self._at_end = attach_recorder(run)
        trackers.start()
        return run

    def _connect(
        self, identity: Identity, device: torch.device, phases: StartPhases
    ) -> tuple[groups.ProcessGroups, list[str]]:
        """Create the process groups and check that they work; do not wait for any that does not.

        Also returns the hosts of all ranks, which rank 0 knows.
        """
        settings, spec = self._settings, self._context.launch_spec
        phases.mark("device")
        store = groups.open_store(identity, timeout=settings.timeout)
        placements = placement.gather_placements(
            store, placement.local_placement(identity, device), identity.world_size
        )
        if placements and settings.report:
            placement.print_placements(placements)
        phases.mark("rendezvous")
        placement.activate(device)
        group = groups.connect(
            identity,
            device,
            store=store,
            backend=settings.backend,
            timeout=settings.timeout,
            check=spec is None or spec.check,
        )
        phases.mark("process_group")
        return group, [each.host for each in placements]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Save, write all numbers and leave together with the other ranks; after an error, leave
        at once.
        """
        global _open
        run, self._run = self._run, None
        assert run is not None
        try:
            if error is None or isinstance(error, Stopped) or _is_plain_exit(error):
                pruned = isinstance(error, Pruned)
                agreed = isinstance(error, Stopped) and not isinstance(error, Completed)
                stopped = not pruned and (agreed or run._boundary.stopping)
                self._leave_together(run, stopped=stopped, pruned=pruned)
            else:
                self._leave_alone(run)
        finally:
            _open = False
            run._boundary.signals.restore()
        if isinstance(error, Stopped):
            raise SystemExit(0) from None
        in_report = self._context.launch_spec is not None
        if process.failure_context and isinstance(error, Exception) and not in_report:
            note(process.failure_context)

    def _leave_together(self, run: Run, *, stopped: bool, pruned: bool = False) -> None:
        """Leave with all ranks: collectives work, and nothing stays in flight."""
        boundary = run._boundary
        try:
            boundary.finish(run.step)
            if self._at_end is not None and not stopped:
                self._at_end()
            if not pruned:  # nothing resumes a pruned trial
                run._save_at_end()
            boundary.checkpoint_schedule.close(wait=True)
            run._close()
        except BaseException:
            self._leave_alone(run)
            raise
        if pruned and run.rank == 0:
            boundary.progress.close()
            note(f"pruned at step {run.step}")
        schedule = boundary.checkpoint_schedule
        if run.rank == 0 and not pruned and schedule.last_step == schedule.failed_step >= 0:
            boundary.heartbeat.mark_unsaved(schedule.failed_step)
        self._print_summary(run, boundary, stopped)
        boundary.metrics.lines.close()
        if run.rank == 0:
            boundary.events.write("session_end", step=run.step)
        boundary.events.close()
        run._group.close()
        boundary.heartbeat.set_state(SAVED_AND_STOPPED if stopped else FINISHED)
        boundary.heartbeat.close()
        run._trackers.close(
            STOPPED if stopped else DONE, urgent=stopped and boundary.signals.is_urgent
        )

    def _leave_alone(self, run: Run) -> None:
        """Leave after an error on this rank, without waiting for any other: no barrier and no
        collective.
        """
        boundary = run._boundary
        boundary.signals.is_leaving = True
        run._group.abandon()
        boundary.progress.close()
        boundary.metrics.finish_alone()
        boundary.checkpoint_schedule.close(wait=False)
        run._close()
        boundary.metrics.lines.close()
        boundary.events.close()
        run._trackers.close(FAILED)

    def _print_summary(self, run: Run, boundary: Boundary, stopped: bool) -> None:
        boundary.progress.close()
        if run.rank == 0 and not stopped and not run._pruned:
            _note_unlogged_best(run, boundary.metrics)
            _note_nothing_left(run, boundary)
        launched = self._context.launch_spec is not None  # then the agent prints it
        if run.rank == 0 and self._settings.report and not stopped and not launched:
            steps = f", {run.step} steps" if run.step else ""
            note(f"done in {_format_duration(time.perf_counter() - self._start)}{steps}")


def _note_unlogged_best(run: Run, metrics: Metrics) -> None:
    """Say so if `best` names a metric that this session has trained without."""
    name, restored = metrics.watched, run._restored
    if name is None or name in metrics.latest or run.step == (restored.step if restored else 0):
        return
    nearest = difflib.get_close_matches(name, metrics.latest, n=1, cutoff=0.0)
    logged = f"the nearest name is {nearest[0]!r}" if nearest else "nor was any other number"
    note(f"best={run.settings.best!r}: nothing was logged as {name!r} in this session; {logged}")


def _note_nothing_left(run: Run, boundary: Boundary) -> None:
    """Say so if the script wanted to train, but all was done before it was resumed."""
    restored = run._restored
    if restored is None or not run._loop.entered or run.step != restored.step:
        return
    boundary.events.write("nothing_left", step=run.step)
    note(
        f"nothing was left to do: step {run.step} was already the last one (epoch {run.epoch}); "
        "to train longer, "
        "increase the number of epochs or steps"
    )


def _is_plain_exit(error: BaseException) -> bool:
    """Return whether this is `sys.exit()` or `sys.exit(0)`. Any other exit code is a failure."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"


def _rates(settings: Settings, device: torch.device, wrapper: Wrapper) -> Rates:
    def find_peak() -> float | None:
        """Return the peak for the precision that the model computes in."""
        dtype = AUTOCAST_DTYPES.get(settings.precision)
        if dtype is None:
            dtype = next(
                (each.dtype for model in wrapper.models for each in model.model.parameters()), None
            )
        return peak_flops(device, dtype)

    return Rates(find_peak=find_peak, find_copies=lambda: wrapper.mesh.tensor, device=device)
