"""When to save a checkpoint, and of which state: always of a step boundary, never of a half-done
step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.contract.foreign_records import EventWriter
from paceline.runtime import randomness
from paceline.runtime.checkpoint.manager import CheckpointManager, Restored, Saved
from paceline.runtime.checkpoint.retention import RetentionPolicy
from paceline.runtime.checkpoint.state_tree import canonical_json, collect, is_loader
from paceline.runtime.settings import Settings, best_metric
from paceline.runtime.training.checksum import Checksum, is_comparable

MAX_COPY = 1 << 20  # bytes of tensors; larger states are not copied


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
        self._updated = False
        # steps at which `best` was logged by hand, of weights that are saved with the next step
        self._belongs_to_next: set[int] = set()

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

    def _on_update(self, *_: Any) -> None:
        self._updated = True

    def count_step(self) -> None:
        """A loop by hand has counted a step: its state is no longer that of the snapshot."""
        self._updated, self.snapshot = False, None

    def note_by_hand(self, step: int) -> None:
        """In a loop by hand, what is logged after an update belongs to the step that is counted
        next.
        """
        if self._updated:
            self._belongs_to_next.add(step)

    def record_best(self, step: int, value: float) -> None:
        """Attach a value of the metric `best` to the checkpoint of the weights that it was
        computed with.
        """
        if step in self._belongs_to_next:
            self._belongs_to_next.discard(step)
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

    def take_snapshot(self) -> None:
        """Remember the state at the end of a loop, at a save by the script, or after a resume.

        A stop during evaluation must save the state of the last boundary, because the code after
        the loop runs again after a resume.
        """
        if self.checkpoints is not None:
            self.snapshot = Snapshot(self._objects)

    def has_changed(self) -> bool:
        """Return whether the objects have changed since the snapshot; True without one."""
        return self.snapshot is None or self.snapshot.has_changed(rank=self.rank)

    @contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Run the body in the state of the last boundary, then return to the current state."""
        if self.snapshot is None:
            yield
            return
        with self.snapshot.restored():
            yield

    def close(self, *, wait: bool) -> None:
        if self.checkpoints is not None:
            self._write_events(self.checkpoints.close(wait=wait))
            self.checkpoints = None


class Snapshot:
    """Copies schedulers, learning rates, random generators and other small state.

    Weights, optimizer state and large states are not copied. Their checksum shows whether they have
    changed.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {name: each for name, each in objects.items() if not is_loader(each)}
        self._rng = randomness.capture()
        self._small = self._copy_small_states()
        self._contents = self._read_contents()

    def weights_changed(self) -> bool:
        """Return whether weights, optimizer state or large states differ now."""
        return self._contents.large.value() != self._read_contents().large.value()

    def has_changed(self, *, rank: int) -> bool:
        """Return whether any state but the random generators differs now. Of buffers, only rank
        0's count.
        """
        return self._contents.values(rank=rank) != self._read_contents().values(rank=rank)

    def restore(self) -> None:
        """Return to this state, except for weights and large states."""
        for name, state in copy.deepcopy(self._small).items():
            stateful = self._objects[name]
            if isinstance(stateful, torch.optim.Optimizer):
                for group, saved in zip(stateful.param_groups, state, strict=True):
                    group.update(saved)
            else:
                stateful.load_state_dict(state)
        randomness.restore(self._rng)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body in this state, then return to the current one."""
        now = Snapshot(self._objects)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def _copy_small_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, stateful in self._objects.items():
            if isinstance(stateful, torch.optim.Optimizer):
                states[name] = [
                    {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                    for group in stateful.param_groups
                ]
            elif not isinstance(stateful, torch.nn.Module):
                found = collect({name: stateful}).tensors
                tensors = [*found.tensors.values(), *found.sharded.values()]
                if sum(tensor.nbytes for tensor in tensors) <= MAX_COPY:
                    states[name] = copy.deepcopy(stateful.state_dict())
        return states

    def _read_contents(self) -> Contents:
        states = collect(self._objects)
        buffers: list[Any] = []
        small: list[Any] = []
        large: list[Any] = []
        for name, tensor in [*states.tensors.tensors.items(), *states.tensors.sharded.items()]:
            owner, _, path = name.partition("/")
            is_optimizer = isinstance(self._objects[owner], torch.optim.Optimizer)
            if name in states.tensors.rank_zero:
                buffers.append(tensor)
            elif owner in self._small and not (is_optimizer and path.startswith("state/")):
                small.append(tensor)
            else:
                large.append(tensor)
        plain = canonical_json([states.replicated, states.per_rank])
        return Contents(_checksum(large), _checksum(small), _checksum(buffers), plain)


@dataclass(frozen=True)
class Contents:
    """What shows whether any state has changed."""

    large: Checksum  # of weights, optimizer state and large states
    small: Checksum  # of copied states
    buffers: Checksum
    plain: str  # values that are no tensors

    def values(self, *, rank: int) -> tuple[Any, ...]:
        buffers = self.buffers.value() if rank == 0 else 0
        return self.large.value(), self.small.value(), buffers, self.plain


def _checksum(tensors: list[Any]) -> Checksum:
    """Return the checksum of this rank's parts of the tensors."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return Checksum(each for each in local if is_comparable(each))
