"""`paceline.session`: set up, provide a `Run`, and exit cleanly whatever happens."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from paceline.contract import process
from paceline.contract.heartbeat_file import FINISHED, SAVED_AND_STOPPED
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED
from paceline.errors import UsageError
from paceline.runtime import session_parts
from paceline.runtime.console import note
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.run import Run
from paceline.runtime.session_parts import SessionParts
from paceline.runtime.settings import Settings
from paceline.runtime.step_boundary.boundary import Boundary
from paceline.runtime.step_boundary.stop_consensus import Completed, Pruned, Stopped
from paceline.runtime.trackers.base import Tracker

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
        profile: Steps to profile: "10:13" writes a trace of steps 10, 11 and 12 into the run
        folder. max_steps: Stop training after this many steps in total.
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
        profile: str | None = None,
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
            profile=profile,
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
        self._parts: SessionParts | None = None

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
            self._parts = session_parts.build(
                self._settings, self._context, self._folder, self._trackers
            )
            return self._parts.run
        except BaseException:
            _open = False
            raise

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
        parts = self._parts
        assert parts is not None
        self._parts = None
        try:
            if error is None or isinstance(error, Stopped) or _is_plain_exit(error):
                pruned = isinstance(error, Pruned)
                agreed = isinstance(error, Stopped) and not isinstance(error, Completed)
                stopped = not pruned and (agreed or parts.boundary.stopping)
                self._leave_together(parts, stopped=stopped, pruned=pruned)
            else:
                self._leave_alone(parts)
        finally:
            _open = False
            parts.boundary.signals.restore()
        if isinstance(error, Stopped):
            raise SystemExit(0) from None
        in_report = self._context.launch_spec is not None
        if process.failure_context and isinstance(error, Exception) and not in_report:
            note(process.failure_context)

    def ignore_signals(self) -> None:
        """Give signals back their meaning: no loop may be running that would notice a request to
        stop.
        """
        if self._parts is not None:
            self._parts.boundary.signals.restore()

    def _leave_together(self, parts: SessionParts, *, stopped: bool, pruned: bool = False) -> None:
        """Leave with all ranks: collectives work, and nothing stays in flight."""
        run, boundary = parts.run, parts.boundary
        try:
            boundary.finish(run.step)
            if parts.at_end is not None and not stopped:
                parts.at_end()
            if not pruned:  # nothing resumes a pruned trial
                run._save_at_end()
            boundary.checkpoint_schedule.close(wait=True)
            run._close()
        except BaseException:
            self._leave_alone(parts)
            raise
        if pruned and run.rank == 0:
            boundary.progress.close()
            note(f"pruned at step {run.step}")
        schedule = boundary.checkpoint_schedule
        if run.rank == 0 and not pruned and schedule.last_step == schedule.failed_step >= 0:
            boundary.heartbeat.mark_unsaved(schedule.failed_step)
        self._print_summary(run, boundary, stopped)
        parts.lines.close()
        if run.rank == 0:
            boundary.events.write("session_end", step=run.step)
        boundary.events.close()
        parts.group.close()
        boundary.heartbeat.set_state(SAVED_AND_STOPPED if stopped else FINISHED)
        boundary.heartbeat.close()
        parts.trackers.close(
            STOPPED if stopped else DONE, urgent=stopped and boundary.signals.is_urgent
        )

    def _leave_alone(self, parts: SessionParts) -> None:
        """Leave after an error on this rank, without waiting for any other: no barrier and no
        collective.
        """
        boundary = parts.boundary
        boundary.signals.is_leaving = True
        parts.group.abandon()
        boundary.progress.close()
        boundary.metrics.finish_alone()
        boundary.checkpoint_schedule.close(wait=False)
        parts.run._close()
        parts.lines.close()
        boundary.events.close()
        parts.trackers.close(FAILED)

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
