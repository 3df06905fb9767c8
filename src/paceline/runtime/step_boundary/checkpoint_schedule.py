"""When to save a checkpoint, and of which state: always of a step boundary, never of a half-done
step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.contract.foreign_records import EventWriter
from paceline.runtime import randomness
from paceline.runtime.checkpoint.manager import CheckpointManager, Restored, Saved
from paceline.runtime.checkpoint.retention import RetentionPolicy
from paceline.runtime.checkpoint.state_tree import canonical_json, encode, store_inline
from paceline.runtime.settings import Settings, best_metric
from paceline.runtime.training.checksum import Checksum, is_comparable

MAX_COPY = 1 << 20  # bytes of tensors; larger states are not copied

LAZY = (UninitializedParameter, UninitializedBuffer)


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
        self._objects = dict(objects)
        self._rng = randomness.capture()
        self._small = _small_states(self._objects)
        self._weights = _checksum(_weights(self._objects, self._small))
        self._buffers = _checksum(_buffers(self._objects))

    def weights_changed(self) -> bool:
        """Return whether weights, optimizer state or large states differ now."""
        return self._weights.value() != _checksum(_weights(self._objects, self._small)).value()

    def has_changed(self, *, rank: int) -> bool:
        """Return whether any state but the random generators differs now. Of buffers, only rank
        0's count.
        """
        if self.weights_changed() or (
            _as_text(self._small) != _as_text(_small_states(self._objects))
        ):
            return True
        return rank == 0 and self._buffers.value() != _checksum(_buffers(self._objects)).value()

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


def _small_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    states = {}
    for name, stateful in objects.items():
        if isinstance(stateful, torch.optim.Optimizer):
            states[name] = [_without_parameters(group) for group in stateful.param_groups]
        elif not isinstance(stateful, torch.nn.Module) and not hasattr(stateful, "micro_batches"):
            state = stateful.state_dict()
            if _tensor_bytes(state) <= MAX_COPY:
                states[name] = copy.deepcopy(state)
    return states


def _weights(objects: Mapping[str, Any], small: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[Any] = []
    for name, stateful in objects.items():
        if isinstance(stateful, torch.nn.Module):
            # Not the parameters themselves: after a forward, FSDP may hold them unsharded.
            state = stateful.state_dict()
            found += [state.get(key) for key, _ in stateful.named_parameters()]
        elif isinstance(stateful, torch.optim.Optimizer):
            found += _tensors(stateful.state)
        elif name not in small and not hasattr(stateful, "micro_batches"):
            found += _tensors(stateful.state_dict())
    return [each for each in found if isinstance(each, torch.Tensor)]


def _buffers(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    modules = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
    return [buffer for module in modules for buffer in module.buffers()]


def _checksum(tensors: list[Any]) -> Checksum:
    """Return the checksum of this rank's parts of the tensors."""
    known = [each for each in tensors if not isinstance(each, LAZY)]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in known]
    return Checksum(each for each in local if is_comparable(each))


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return []
    return [tensor for each in state for tensor in _tensors(each)]


def _tensor_bytes(state: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _as_text(state: Any) -> str:
    """Return a state as text that equal states have in common."""
    return canonical_json(encode(state, "state", store_inline))
