"""When to save a checkpoint, and of which state: always of a step boundary, never of a half-done step."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.contract.jsonl import EventWriter
from paceline.runtime.checkpoint import CheckpointManager, Restored, RetentionPolicy, Saved, rng
from paceline.runtime.settings import Settings

MAX_SNAPSHOT = 1 << 20  # bytes of tensors; larger states are not copied at the end of a loop

NORM_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointSchedule:
    """Saves the checkpoints of a session. Until `resume` is called, every other call does nothing."""

    def __init__(self, settings: Settings, *, rank: int, events: EventWriter) -> None:
        self.settings = settings
        self.rank = rank
        self.events = events
        self.checkpoints: CheckpointManager | None = None
        self.last_step = -1  # the step that was saved last, or restored
        self.failed_step = -1  # the step whose save failed; only rank 0 knows of all failures
        self._objects: dict[str, Any] = {}
        self._since = time.perf_counter()
        self._snapshot: dict[str, Any] = {}
        self._snapshot_rng: dict[str, Any] | None = None
        self._snapshot_norms: list[torch.Tensor] = []

    def policy(self) -> RetentionPolicy:
        """Return which checkpoints to keep."""
        best = self.settings.best
        mode, _, name = best.partition(":") if best and ":" in best else ("max", "", best or "")
        return RetentionPolicy(
            keep_last=self.settings.keep_last, keep_every=self.settings.keep_every, best=name or None, best_mode=mode
        )

    def resume(self, checkpoints: CheckpointManager, objects: dict[str, Any]) -> Restored | None:
        """Register these objects, and load the newest complete checkpoint into them."""
        self.checkpoints = checkpoints
        self._objects = objects
        checkpoints.register(**objects)
        start = self.settings.start_from
        found = checkpoints.restore(Path(start) if start else None)
        self._since = time.perf_counter()
        if found is not None and found.own:
            self.last_step = found.step
        return found

    # -- when to save ------------------------------------------------------------------------------------------

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

    # -- save ------------------------------------------------------------------------------------------

    def save(self, step: int, *, epoch: int, meta: dict[str, Any], wait: bool = False) -> None:
        if self.checkpoints is None:
            return
        self._since = time.perf_counter()
        blocked = self.checkpoints.save(step, epoch, meta, wait)
        self.last_step = step
        self.events.write("saving", step=step, blocked=round(blocked, 6))
        self.collect_finished()

    def collect_finished(self) -> None:
        """Record the saves that have finished since the last call."""
        if self.checkpoints is not None:
            self._write_events(self.checkpoints.poll())

    def _write_events(self, finished: list[Saved]) -> None:
        for saved in finished:
            if saved.complete:
                self.events.write("saved", step=saved.step, folder=str(saved.folder), seconds=round(saved.seconds, 6))
            else:
                self.failed_step = saved.step
                self.events.write("save_failed", step=saved.step, error=saved.error)

    # -- the last training boundary --------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Copy what may change after the loop: schedulers, learning rates, random number generators.

        A stop during evaluation must save the state of the last boundary, because the code after the loop runs
        again after a resume. Weights and optimizer moments do not change in evaluation, so they are not copied.
        """
        if self.checkpoints is None:
            return
        self._snapshot, self._snapshot_rng = {}, rng.capture()
        self._snapshot_norms = self._parameter_norms()
        for name, stateful in self._objects.items():
            if isinstance(stateful, torch.optim.Optimizer):
                self._snapshot[name] = [_without_parameters(group) for group in stateful.param_groups]
            elif not isinstance(stateful, torch.nn.Module) and not hasattr(stateful, "micro_batches"):
                state = stateful.state_dict()
                if _tensor_bytes(state) <= MAX_SNAPSHOT:
                    self._snapshot[name] = copy.deepcopy(state)

    def weights_changed(self) -> bool:
        """Return whether the models' weights differ from those at the last boundary."""
        if self._snapshot_rng is None or self.checkpoints is None:
            return False
        norms = self._parameter_norms()
        return [norm.item() for norm in self._snapshot_norms] != [norm.item() for norm in norms]

    def _parameter_norms(self) -> list[torch.Tensor]:
        """Return one norm per parameter, on its device: enough to notice that weights were exchanged."""
        models = [each for each in self._objects.values() if isinstance(each, torch.nn.Module)]
        parameters: list[Any] = []
        for model in models:
            names = [name for name, _ in model.named_parameters()]
            # Not the parameters themselves: after a forward, FSDP may hold them unsharded.
            state = model.state_dict()
            parameters += [state[name] for name in names if isinstance(state.get(name), torch.Tensor)]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in parameters]
        known = [each for each in local if each.dtype in NORM_DTYPES]
        return list(torch._foreach_norm(known)) if known else []

    def restore_snapshot(self) -> None:
        """Return to the state of the last boundary."""
        for name, state in copy.deepcopy(self._snapshot).items():
            stateful = self._objects[name]
            if isinstance(stateful, torch.optim.Optimizer):
                for group, saved in zip(stateful.param_groups, state, strict=True):
                    group.update(saved)
            else:
                stateful.load_state_dict(state)
        if self._snapshot_rng is not None:
            rng.restore(self._snapshot_rng)

    @contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Run the body in the state of the last boundary, then return to the current state."""
        if self._snapshot_rng is None:
            yield
            return
        boundary, norms = (self._snapshot, self._snapshot_rng), self._snapshot_norms
        self.take_snapshot()
        now = self._snapshot, self._snapshot_rng
        (self._snapshot, self._snapshot_rng), self._snapshot_norms = boundary, norms
        self.restore_snapshot()
        try:
            yield
        finally:
            self._snapshot, self._snapshot_rng = now
            self.restore_snapshot()
            self._snapshot, self._snapshot_rng = boundary

    def drop_snapshot(self) -> None:
        self._snapshot, self._snapshot_rng = {}, None

    def close(self, *, wait: bool) -> None:
        if self.checkpoints is not None:
            self._write_events(self.checkpoints.close(wait=wait))
            self.checkpoints = None


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(_tensor_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_tensor_bytes, state))
    return 0
