"""The step boundary: heartbeat, agreement, save, stop. Between two iterations, and nowhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.contract.heartbeat_file import RUNNING
from paceline.contract.jsonl import EventWriter
from paceline.runtime.boundary.checkpoint_schedule import CheckpointSchedule
from paceline.runtime.boundary.heartbeat import Heartbeat
from paceline.runtime.boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.boundary.profiler import ProfilerWindow
from paceline.runtime.boundary.stop import (
    MINUS_BAD_STEP,
    MINUS_SCHEMA,
    SAVE,
    SCHEMA,
    SIZE,
    STOP,
    StopConsensus,
    Stopped,
    StopSignals,
)
from paceline.runtime.boundary.stragglers import StragglerDetector
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import Progress


class Boundary:
    """What happens between steps. Its parts know nothing of each other; their order is decided here."""

    def __init__(
        self,
        *,
        group: Any,
        heartbeat: Heartbeat,
        events: EventWriter,
        metrics: Metrics,
        loss_check: NonFiniteLossCheck,
        checkpoint_schedule: CheckpointSchedule,
        progress: Progress,
        stragglers: StragglerDetector,
        profiler: ProfilerWindow,
        sync_buffers: Callable[[], None],
    ) -> None:
        self.consensus = StopConsensus(group)
        self.signals = StopSignals(heartbeat, self.consensus.hurry)
        self.heartbeat = heartbeat
        self.events = events
        self.metrics = metrics
        self.loss_check = loss_check
        self.checkpoint_schedule = checkpoint_schedule
        self.progress = progress
        self.stragglers = stragglers
        self.profiler = profiler
        self.stopping = False  # agreed: all ranks know
        self.epoch = 0
        self.epoch_step = 0  # steps done within this epoch
        self.tracker_ids: dict[str, str] = {}  # so that a tracker's run goes on where the run does
        self.plain_batches = 0  # batches per step of an iterable that keeps no position of its own
        self._sync_buffers = sync_buffers
        self._save_wanted = False  # agreed, and waits for a training boundary
        self._put_off = False  # a stop was agreed on in an evaluation, and waits for one, too
        self._beating = heartbeat.is_on
        self._busy = True

    @property
    def is_busy(self) -> bool:
        """Whether a boundary has to look further than the agreement."""
        return (
            self._save_wanted
            or self.checkpoint_schedule.counts_steps
            or self.profiler.wanted
            or self.progress.shown
        )

    def begin_loop(self, *, epoch: int, done: int, total: int | None, plain_batches: int) -> None:
        """A loop begins with `done` of its `total` steps behind it."""
        self.epoch, self.epoch_step, self.plain_batches = epoch, done, plain_batches
        self.checkpoint_schedule.release()
        self.progress.begin(epoch=epoch, done=done, total=total)
        self.consensus.begin_loop()
        self.stragglers.forget()
        self._busy = self.is_busy

    def enter_epoch(self, epoch: int) -> None:
        """A save outside of loops may belong to an epoch of which no step is done."""
        if epoch != self.epoch:
            self.epoch, self.epoch_step = epoch, 0

    # -- the loop's calls ------------------------------------------------------------------------------

    def before_first(self, step: int) -> None:
        """Ahead of the first step: a request that came during set-up is answered now. Nothing is to be saved."""
        self.heartbeat.state = RUNNING
        self.heartbeat(step)
        self.events.write("training", step=step)
        if self.profiler.wanted:
            self.profiler.boundary(step)
        self._meet()
        if self.stopping:
            self._leave(step)

    def after_step(self, step: int) -> None:
        """The boundary after a training step. Raises `Stopped` when the ranks have agreed to."""
        if self._beating:
            self.heartbeat(step)
        consensus = self.consensus
        consensus.tick = tick = consensus.tick + 1
        if tick >= consensus.due:
            self._meet()
            if self.stopping:
                self._save(step, wait=True)
                self._leave(step)
            if self.stragglers.on:
                self.stragglers.begin()
        if self._busy:
            self._attend(step)

    def _attend(self, step: int) -> None:
        """What most runs do not want at most boundaries."""
        if self._save_wanted or self.checkpoint_schedule.due_by_step(step):
            self._save(step)
            if self.stopping:  # the ranks met for the save, and one of them had been asked
                self._save(step, wait=True)
                self._leave(step)
        if self.profiler.wanted:
            self.profiler.boundary(step)
        if time.perf_counter() >= self.progress.due:
            self.progress.update(self.epoch_step, self.metrics.latest)
        self._busy = self.is_busy

    def after_forward(self, step: int, *, in_a_step: bool) -> None:
        """The boundary after a batch of evaluation: no state of its own, so a stop saves the last training one.

        Where that state is not at hand, the next training boundary is where it stops: within the body of a step,
        and while the script has put other weights into its model (averaged ones, to evaluate them).
        """
        self.heartbeat(step)
        consensus = self.consensus
        consensus.tick += 1
        if consensus.tick < consensus.due or self._put_off:
            return
        self._meet()
        if not self.stopping:
            return
        if in_a_step or consensus.any_rank(self.checkpoint_schedule.has_other_weights()):
            self._put_off = True
            consensus.due = 0
            return
        if step > 0 and step != self.checkpoint_schedule.last_step:
            self.checkpoint_schedule.put_back()
            self._save(step, wait=True)
        self._leave(step)

    def poll(self, step: int) -> bool:
        """The boundary of a hand-written loop."""
        self.heartbeat.state = max(self.heartbeat.state, RUNNING)
        self.heartbeat(step)
        self.consensus.tick += 1
        if not self.stopping and self.consensus.tick >= self.consensus.due:
            self._meet()
        return self.stopping

    def save(self, step: int, *, wait: bool = False) -> None:
        """A save that the script asks for, or the one at the end. Called on all ranks."""
        self._save(step, wait=wait)

    def finish(self) -> None:
        """At a clean end, on all ranks: nothing stays under way, and every logged number is written."""
        self._write_numbers()

    def _write_numbers(self) -> None:
        if self.consensus.under_way:
            self._decide(self.consensus.harvest())
        self._launch()
        self._decide(self.consensus.harvest())
        self.metrics.advance(True)
        self.consensus.schedule()

    # -- meeting ---------------------------------------------------------------------------------------

    def _meet(self) -> None:
        if self.consensus.under_way:
            self._decide(self.consensus.harvest())
            if self.stopping:
                return
        self._launch()
        if self.consensus.at_once:
            self._decide(self.consensus.harvest())
        self.consensus.schedule()

    def _launch(self) -> None:
        schema = self.metrics.offer()
        words = [0.0] * (SIZE + self.stragglers.words)
        if self.stragglers.on:
            words[SIZE + self.checkpoint_schedule.rank] = self.stragglers.own()
        words[STOP] = float(self.signals.asked or self.heartbeat.stop_requested)
        words[SAVE] = float(self.checkpoint_schedule.due_by_time())
        words[SCHEMA], words[MINUS_SCHEMA] = schema, -schema
        words[MINUS_BAD_STEP] = self.loss_check.advance()
        self.heartbeat.seconds_per_step = self.consensus.launch(words)

    def _decide(self, agreed: list[float]) -> None:
        self.loss_check.judge(agreed[MINUS_BAD_STEP])
        self.metrics.advance(agreed[SCHEMA] == -agreed[MINUS_SCHEMA])
        if agreed[SAVE]:
            self._save_wanted = self._busy = True
        self.stopping |= bool(agreed[STOP])
        if self.stragglers.on:
            seconds = self.consensus.seconds
            self.stragglers.judge(
                agreed[SIZE:], step=self.heartbeat.step, epoch=self.epoch, seconds_per_step=seconds
            )
        self.checkpoint_schedule.harvest()

    # -- saving and leaving ----------------------------------------------------------------------------

    def _save(self, step: int, *, wait: bool = False) -> None:
        if self.checkpoint_schedule.checkpoints is None:
            self._save_wanted = False
            return
        if self.loss_check.on:
            self.loss_check.look_now()
        # Numbers that led to a checkpoint are written ahead of it: no later attempt would log them again.
        self._write_numbers()
        self._save_wanted = False
        self._sync_buffers()
        meta = {
            "epoch_step": self.epoch_step,
            "plain_batches": self.plain_batches * self.epoch_step,
            "metrics": dict(self.metrics.latest),
            "trackers": self.tracker_ids,
        }
        self.checkpoint_schedule.save(step, epoch=self.epoch, meta=meta, wait=wait)
        if self.stragglers.on:
            self.stragglers.begin()  # the save was not part of the step

    def _leave(self, step: int) -> None:
        saved = self.checkpoint_schedule.last_step == step
        if self.checkpoint_schedule.rank == 0:
            told = "saved" if saved else "nothing to save"
            if saved and self.checkpoint_schedule.failed_step == step:
                told = "and could not save it"
            self.progress.close()
            print(f"paceline: stopped at step {step}, {told}", file=sys.stderr, flush=True)
        raise Stopped
