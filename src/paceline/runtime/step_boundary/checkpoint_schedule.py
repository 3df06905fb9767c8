"""When to save a checkpoint, and of which state: always of a step boundary, never of a half-done
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.contract.jsonl import EventWriter
from paceline.runtime.checkpoint import CheckpointManager, Restored, RetentionPolicy, Saved
from paceline.runtime.settings import Settings, best_metric
from paceline.runtime.step_boundary.state_snapshot import Snapshot


class CheckpointSchedule:
    """Saves the checkpoints of a session. Until `resume` is called, every other call does
    nothing.
    """

    def __init__(self, settings: Settings, *, rank: int, events: EventWriter) -> None:
        self.settings = settings
        self.rank = rank
        self.events = events
        self.checkpoints: CheckpointManager | None = None
        self.last_step = -1  # the step that was saved last, or restored
        self.failed_step = -1  # the step whose save failed; only rank 0 knows of all failures
        self._objects: dict[str, Any] = {}
        self._since = time.perf_counter()
        best = best_metric(settings.best)
        # the metric to keep the best checkpoint by
        self.best: str | None = best[0] if best else None
        self._best_mode = best[1] if best else "min"
        # of the last boundary, or of the last `run.save` or `run.resume`
        self.snapshot: Snapshot | None = None
        # whether an optimizer has stepped since the last step was counted; only with `best`
        self.updated = False
        # steps at which `best` was logged of weights that are saved with the next step
        self._early: set[int] = set()

    def policy(self) -> RetentionPolicy:
        """Return which checkpoints to keep."""
        return RetentionPolicy(
            keep_last=self.settings.keep_last,
            keep_every=self.settings.keep_every,
            best=self.best,
            best_mode=self._best_mode,
        )

    def resume(
        self, checkpoints: CheckpointManager, objects: dict[str, Any], *, strict: bool
    ) -> Restored | None:
        """Register these objects, and load the newest complete checkpoint into them."""
        if self.checkpoints is not None:  # of an earlier `run.resume`
            self.checkpoints.close()
        self.checkpoints = checkpoints
        self._objects = objects
        checkpoints.register(**objects)
        start, settings = self.settings.start_from, self.settings
        found = checkpoints.restore(
            Path(start) if start else None,
            weights_only=not settings.start_continue,
            strict=strict,
            start_strict=settings.start_strict,
        )
        self._since = time.perf_counter()
        if found is not None and found.own:
            self.last_step = found.step
        if self.best is not None:
            for each in objects.values():
                if isinstance(each, torch.optim.Optimizer):
                    each.register_step_post_hook(self._on_update)
        self.take_snapshot()
        return found

    # -- when to save
    # ------------------------------------------------------------------------------------------

    @property
    def counts_steps(self) -> bool:
        return self.settings.save_every_steps is not None and self.checkpoints is not None

    def due_by_step(self, step: int) -> bool:
        every = self.settings.save_every_steps
        return every is not None and self.checkpoints is not None and step % every == 0

    def due_by_time(self) -> bool:
        """Return whether a save is due by rank 0's clock. The other ranks learn it by consensus."""
        every = self.settings.save_every_seconds
        if every is None or self.checkpoints is None or self.rank:
            return False
        return time.perf_counter() - self._since >= every

    # -- save
    # ------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        epoch: int,
        meta: dict[str, Any],
        waited: float = 0.0,
        wait: bool = False,
        replace: bool = False,
    ) -> None:
        """Save this step, unless it is saved already; with `replace`, save it again.

        `waited` are the seconds for which the loop has waited for data so far.
        """
        if self.checkpoints is None:
            return
        self._since = time.perf_counter()
        blocked = self.checkpoints.save(step, epoch, meta, wait, replace=replace)
        self.last_step = step
        self.events.write("saving", step=step, blocked=round(blocked, 6), waited=round(waited, 3))
        self.collect_finished()

    def collect_finished(self) -> None:
        """Record the saves that have finished since the last call."""
        if self.checkpoints is not None:
            self._write_events(self.checkpoints.poll())

    def _write_events(self, finished: list[Saved]) -> None:
        for saved in finished:
            if saved.complete:
                self.events.write(
                    "saved",
                    step=saved.step,
                    folder=str(saved.folder),
                    seconds=round(saved.seconds, 6),
                )
            else:
                self.failed_step = saved.step
                self.events.write("save_failed", step=saved.step, error=saved.error)

    # -- the best checkpoint
    # ---------------------------------------------------------------------------

    def _on_update(self, *_: Any) -> None:
        self.updated = True

    def count_step(self) -> None:
        """A loop by hand has counted a step: its state is no longer that of the snapshot."""
        self.updated, self.snapshot = False, None

    def note_early(self, step: int) -> None:
        """In a loop by hand, what is logged after an update belongs to the step that is counted
        next.
        """
        if self.updated:
            self._early.add(step)

    def record_best(self, step: int, value: float) -> None:
        """Attach a value of the metric `best` to the checkpoint of the weights that it was
        computed with.
        """
        if step in self._early:
            self._early.discard(step)
            step += 1
        if self.checkpoints is not None and self.rank == 0:
            self.checkpoints.attach(step, value)

    def is_new_best(self, step: int) -> bool:
        """Return whether this step has the best value so far, but no checkpoint. Only rank 0
        knows.
        """
        if self.checkpoints is None or self.rank or step == self.last_step:
            return False
        return self.checkpoints.is_new_best(step)

    # -- the last training boundary
    # --------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Remember the state at the end of a loop, at a save by the script, or after a resume.

        A stop during evaluation must save the state of the last boundary, because the code after
        the loop runs again after a resume.
        """
        if self.checkpoints is not None:
            self.snapshot = Snapshot(self._objects)

    def weights_changed(self) -> bool:
        """Return whether the weights differ from those at the last boundary."""
        return (
            self.snapshot is not None
            and self.checkpoints is not None
            and self.snapshot.weights_changed()
        )

    def has_changed(self) -> bool:
        """Return whether the objects have changed since the snapshot; True without one."""
        return self.snapshot is None or self.snapshot.has_changed(rank=self.rank)

    def restore_snapshot(self) -> None:
        """Return to the state of the last boundary."""
        if self.snapshot is not None:
            self.snapshot.restore()

    @contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Run the body in the state of the last boundary, then return to the current state."""
        if self.snapshot is None:
            yield
            return
        with self.snapshot.restored():
            yield

    def drop_snapshot(self) -> None:
        self.snapshot = None

    def close(self, *, wait: bool) -> None:
        if self.checkpoints is not None:
            self._write_events(self.checkpoints.close(wait=wait))
            self.checkpoints = None
