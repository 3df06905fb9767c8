"""The step boundary: heartbeats, consensus, saves and stops happen between iterations, and nowhere
else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paceline.contract.foreign_records import EventWriter
from paceline.contract.heartbeat_file import RUNNING
from paceline.runtime.checkpoint.manager import CheckpointManager, Restored
from paceline.runtime.console import note
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import ProgressBar
from paceline.runtime.step_boundary.checkpoint_schedule import CheckpointSchedule
from paceline.runtime.step_boundary.heartbeat import Heartbeat
from paceline.runtime.step_boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.step_boundary.stop_consensus import (
    BATCH,
    MINUS_BAD_STEP,
    MINUS_BATCH,
    MINUS_SCHEMA,
    SAVE,
    SCHEMA,
    SIZE,
    STOP,
    StopConsensus,
    Stopped,
    StopSignals,
)
from paceline.runtime.step_boundary.stragglers import StragglerDetector
from paceline.runtime.training.replica_check import ReplicaCheck

SAME_BATCH = (
    "all ranks got the same first batch: each trains on all of the data. Use run.loader(dataset, "
    "batch_size=<global>), "
    "or a DistributedSampler."
)


class StartPhases:
    """A clock with names: each mark says how long it is since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now

    def take_out(self, name: str, seconds: float) -> None:
        """Count a part of the phase that goes on under another name."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self._last += seconds

    def finish(self, waited: float) -> dict[str, float]:
        """Return all phases. The last two are the first batch, for which the loop has waited, and
        the first step.
        """
        took = time.perf_counter() - self._last
        self.seconds["first_batch"] = round(waited, 3)
        self.seconds["first_step"] = round(max(0.0, took - waited), 3)
        return self.seconds


class Boundary:
    """Runs what happens between steps, in order. Its parts do not know each other."""

    def __init__(
        self,
        *,
        group: Any,
        heartbeat: Heartbeat,
        events: EventWriter,
        metrics: Metrics,
        loss_check: NonFiniteLossCheck,
        checkpoint_schedule: CheckpointSchedule,
        progress: ProgressBar,
        stragglers: StragglerDetector,
        replicas: ReplicaCheck,
        sync_buffers: Callable[[], None],
        phases: StartPhases,
    ) -> None:
        self.consensus = StopConsensus(group)
        self.signals = StopSignals(heartbeat, self.consensus.expedite, metrics.finish_alone)
        self.heartbeat = heartbeat
        self.events = events
        self.metrics = metrics
        self.loss_check = loss_check
        self.checkpoint_schedule = checkpoint_schedule
        metrics.watched, metrics.on_watched = (
            checkpoint_schedule.best,
            checkpoint_schedule.record_best,
        )
        self.progress = progress
        self.stragglers = stragglers
        self.replicas = replicas
        self.stopping = False  # all ranks have agreed to stop
        self.epoch = 0
        self.epoch_step = 0  # steps done in this epoch
        # which loop of the epoch it is; set by the loop
        self.loop_position: Callable[[], dict[str, Any]] = dict
        # `run.save` has saved what the epoch's body did after its loop
        self.saved_after_loop = False
        self.first_batch: Callable[[], int | None] | None = None  # returns its digest; None if done
        self.before_save: Callable[[], None] = lambda: None
        self._sync_buffers = sync_buffers
        self._phases: StartPhases | None = phases  # None after the first step
        self.awaits_batch = True  # the first one of this process
        self._evaluated = False  # within the current step
        self._save_requested = False  # agreed; waits for a training boundary
        self._stop_deferred = False  # agreed during an evaluation; waits for a training boundary

    def begin_loop(self, *, epoch: int, done: int, total: int | None) -> None:
        """Begin a loop of `total` steps, of which `done` are already done."""
        self.epoch, self.epoch_step = epoch, done
        self.checkpoint_schedule.snapshot = None
        self.saved_after_loop = self._evaluated = False
        self.progress.begin(epoch=epoch, done=done, total=total)
        self.consensus.begin_loop()
        self.stragglers.discard()
        self.metrics.throughput.begin_loop()

    def end_loop(self) -> None:
        self.metrics.throughput.end_loop()
        self.progress.end()

    def restore(
        self, checkpoints: CheckpointManager, objects: dict[str, Any], *, strict: bool
    ) -> Restored | None:
        """Load the newest complete checkpoint. The time that it takes is a phase of the start."""
        began = time.perf_counter()
        restored = self.checkpoint_schedule.resume(checkpoints, objects, strict=strict)
        if self._phases is not None and restored is not None:
            self._phases.take_out("restore", time.perf_counter() - began)
        return restored

    def begin_evaluation(self) -> None:
        self._sync_buffers()
        self.consensus.begin_loop()

    def enter_epoch(self, epoch: int) -> None:
        """Set the epoch for a save outside of loops; it may be one in which no step is done."""
        if epoch != self.epoch:
            self.epoch, self.epoch_step = epoch, 0

    def end_epoch(self, step: int, *, epoch: int) -> None:
        """Save at the end of an epoch's body what `run.save` could not have saved, and what
        evaluated best.

        `epoch` is the next one. Called on all ranks.
        """
        schedule = self.checkpoint_schedule
        saved, self.saved_after_loop = self.saved_after_loop, False
        if schedule.checkpoints is None or not (saved or schedule.best):
            return
        if schedule.best:
            self._flush_metrics()
        if self.consensus.any_rank(
            (saved and schedule.has_changed()) or schedule.is_new_best(step)
        ):
            self.save(step, next_epoch=epoch, replace=True)

    # -- called by the loop

    def before_first(self, step: int) -> None:
        """Run the boundary before the first step. A stop requested during set-up ends here;
        nothing is saved.
        """
        self.heartbeat.state = RUNNING
        self.heartbeat.write(step)
        if self._phases is not None:
            self._phases.mark("setup")
        self.events.write(
            "training", step=step, **({"seconds": self._phases.seconds} if self._phases else {})
        )
        self._run_consensus()
        if self.stopping:
            self._stop(step)

    def note_first_batch(self, step: int) -> None:
        """The first step begins, in which models compile."""
        self.awaits_batch = False
        self.events.write("first_batch", step=step)

    def after_step(self, step: int) -> None:
        """Run the boundary after a training step. Raises Stopped if the ranks have agreed to
        stop.
        """
        if self._phases is not None:
            self.events.write(
                "first_step", step=step, seconds=self._phases.finish(self.metrics.throughput.waited)
            )
            self._phases = None
        self.heartbeat.write(step)
        consensus = self.consensus
        consensus.tick = tick = consensus.tick + 1
        if tick >= consensus.due:
            self._run_consensus()
            if self.stopping:
                self.save(step, wait=True)
                self._stop(step)
            self.replicas.check_when_due(step)
            self.stragglers.mark_start()
        evaluated = self._evaluated
        if evaluated:
            self._evaluated = False
            self._flush_metrics()
            evaluated = consensus.any_rank(self.checkpoint_schedule.is_new_best(step))
        if evaluated or self._save_requested or self.checkpoint_schedule.due_by_step(step):
            self.save(step)
            if self.stopping:  # the save ran a consensus, in which a rank requested a stop
                self.save(step, wait=True)
                self._stop(step)
        if self.progress.is_shown and time.perf_counter() >= self.progress.due:
            self.progress.update(self.epoch_step, self.metrics.latest, self.metrics.latest_rates)

    def after_forward(self, step: int, *, in_a_step: bool) -> None:
        """Run the boundary after a batch of evaluation. A stop saves the state of the last training
        boundary.

        The stop waits for the next training boundary if that state is not available: inside the
        body of a step, or while the script has put other weights into its model, such as averaged
        ones, or has saved after its loop.
        """
        self.heartbeat.write(step)
        if in_a_step and self.checkpoint_schedule.best:
            self._evaluated = True
        consensus = self.consensus
        consensus.tick += 1
        if consensus.tick < consensus.due or self._stop_deferred:
            return
        self._run_consensus()
        if not self.stopping:
            return
        snapshot = self.checkpoint_schedule.snapshot
        changed = snapshot is not None and not in_a_step and snapshot.weights_changed()
        if in_a_step or self.saved_after_loop or consensus.any_rank(changed):
            self._stop_deferred = True
            consensus.due = 0
            return
        if step > 0 and step != self.checkpoint_schedule.last_step:
            if snapshot is not None:
                snapshot.restore()
            self.save(step, wait=True)
        self._stop(step)

    def poll(self, step: int, *, may_save: bool) -> bool:
        """Run the boundary of a hand-written loop. Returns whether to stop."""
        self.heartbeat.state = max(self.heartbeat.state, RUNNING)
        self.heartbeat.write(step)
        self.consensus.tick += 1
        if not self.stopping and self.consensus.tick >= self.consensus.due:
            self._run_consensus()
            if may_save and not self.stopping:
                self.replicas.check_when_due(step)
        due = self._save_requested or self.checkpoint_schedule.due_by_step(step)
        if due and may_save and not self.stopping:
            self.save(step)
        return self.stopping

    def any_rank_changed(self) -> bool:
        """Return whether the objects have changed since the snapshot. Blocks; all ranks call it."""
        return self.consensus.any_rank(self.checkpoint_schedule.has_changed())

    def finish(self, step: int) -> None:
        """Write all logged numbers at a clean end, and leave no reduction in flight. Called on all
        ranks.

        Losses that no consensus has checked yet are checked here: a short run must not end well
        with a bad one.
        """
        self.loss_check.settle()
        self._flush_metrics()
        self.replicas.check_now(step)

    def _flush_metrics(self) -> None:
        if self.consensus.in_flight:
            self._apply(self.consensus.collect())
        self._launch_consensus()
        self._apply(self.consensus.collect())
        self.metrics.advance()
        self.consensus.schedule()

    # -- consensus

    def _run_consensus(self) -> None:
        if self.consensus.in_flight:
            self._apply(self.consensus.collect())
            if self.stopping:
                return
        self._launch_consensus()
        if self.consensus.is_synchronous:
            self._apply(self.consensus.collect())
        self.consensus.schedule()

    def _launch_consensus(self) -> None:
        schema = self.metrics.offer()
        values = [0.0] * (SIZE + self.stragglers.slots)
        own = self.stragglers.own_seconds()
        if self.stragglers.on:
            values[SIZE + self.checkpoint_schedule.rank] = own
        self.heartbeat.write_times(self.metrics.throughput.waited_in_all, own)
        values[STOP] = float(self.signals.requested or self.heartbeat.stop_requested)
        values[SAVE] = float(self.checkpoint_schedule.due_by_time())
        values[SCHEMA], values[MINUS_SCHEMA] = schema, -schema
        values[MINUS_BAD_STEP] = self.loss_check.advance()
        batch = self.first_batch() if self.first_batch is not None else None
        values[BATCH], values[MINUS_BATCH] = (
            (math.inf, math.inf) if batch is None else (batch, -batch)
        )
        self.heartbeat.seconds_per_step = self.consensus.launch(values)

    def _apply(self, reduced: list[float]) -> None:
        """Act on what the ranks agreed on."""
        self.loss_check.check_consensus(reduced[MINUS_BAD_STEP])
        self.metrics.advance(same=reduced[SCHEMA] == -reduced[MINUS_SCHEMA])
        if self.first_batch is not None and reduced[BATCH] < math.inf:  # all ranks have one
            self.first_batch = None
            if reduced[BATCH] == -reduced[MINUS_BATCH] and self.checkpoint_schedule.rank == 0:
                note(SAME_BATCH)
        if reduced[SAVE]:
            self._save_requested = True
        self.stopping |= bool(reduced[STOP])
        self.stragglers.report(
            reduced[SIZE:],
            step=self.heartbeat.step,
            epoch=self.epoch,
            seconds_per_step=self.consensus.seconds,
        )
        self.checkpoint_schedule.collect_finished()

    # -- save and stop

    def save(
        self, step: int, *, wait: bool = False, replace: bool = False, next_epoch: int | None = None
    ) -> None:
        """Save this step. Called on all ranks.

        With `next_epoch`, a resume begins that epoch. With `replace`, a checkpoint of this step is
        replaced.
        """
        if self.checkpoint_schedule.checkpoints is None:
            self._save_requested = False
            return
        self.loss_check.check_now()
        self.replicas.check_now(step)
        self.before_save()
        # Write the numbers that led to a checkpoint before it: no later attempt would log them
        # again.
        self._flush_metrics()
        self._save_requested = False
        self._sync_buffers()
        epoch, epoch_step = (self.epoch, self.epoch_step) if next_epoch is None else (next_epoch, 0)
        meta = {
            "epoch_step": epoch_step,
            "position": self.loop_position() if next_epoch is None else {},
        }
        waited = self.metrics.throughput.waited_in_all
        self.checkpoint_schedule.save(
            step, epoch=epoch, meta=meta, waited=waited, wait=wait, replace=replace
        )
        self.stragglers.mark_start()  # the save was not part of the step

    def _stop(self, step: int) -> None:
        schedule = self.checkpoint_schedule
        if schedule.rank == 0:
            outcome = "saved" if schedule.last_step == step else "nothing to save"
            if schedule.last_step == step == schedule.failed_step:
                outcome = "but could not save"
            elif step and schedule.checkpoints is None:
                outcome = (
                    "but nothing is saved: the script has not called run.resume(model=model, ...)"
                )
            self.progress.close()
            note(f"stopped at step {step}, {outcome}")
        raise Stopped
