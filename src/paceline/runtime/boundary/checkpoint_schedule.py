"""When checkpoints are written, and of what moment: between steps, and never of a half-done one."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.contract.jsonl import EventWriter
from paceline.runtime.checkpoint import Checkpoints, Policy, Restored, Saved, rng
from paceline.runtime.settings import Settings

SMALL = 1 << 20  # bytes of tensors up to which a state is copied aside at the end of an epoch

NORMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointSchedule:
    """The checkpoints of a session; without `resume` there are none, and every call does nothing."""

    def __init__(self, settings: Settings, *, rank: int, events: EventWriter) -> None:
        self.settings = settings
        self.rank = rank
        self.events = events
        self.checkpoints: Checkpoints | None = None
        self.last_step = -1  # whose state is saved, or came from a checkpoint
        self.failed_step = -1  # whose save came to nothing; only rank 0 knows of all
        self._objects: dict[str, Any] = {}
        self._since = time.perf_counter()
        self._held: dict[str, Any] = {}
        self._held_randomness: dict[str, Any] | None = None
        self._held_norms: list[torch.Tensor] = []

    def policy(self) -> Policy:
        best = self.settings.best
        mode, _, name = best.partition(":") if best and ":" in best else ("max", "", best or "")
        return Policy(
            keep_last=self.settings.keep_last,
            keep_every=self.settings.keep_every,
            best=name or None,
            best_mode=mode,
        )

    def resume(self, checkpoints: Checkpoints, objects: dict[str, Any]) -> Restored | None:
        """Take charge of these objects, and load the newest complete checkpoint into them."""
        self.checkpoints = checkpoints
        self._objects = objects
        checkpoints.register(**objects)
        start = self.settings.start_from
        found = checkpoints.restore(Path(start) if start else None)
        self._since = time.perf_counter()
        if found is not None and found.own:
            self.last_step = found.step
        return found

    # -- when ------------------------------------------------------------------------------------------

    @property
    def counts_steps(self) -> bool:
        return self.settings.save_every_steps is not None and self.checkpoints is not None

    def due_by_step(self, step: int) -> bool:
        every = self.settings.save_every_steps
        return every is not None and self.checkpoints is not None and step % every == 0

    def due_by_time(self) -> bool:
        """Rank 0's clock; the others learn of it by the agreement."""
        every = self.settings.save_every_seconds
        if every is None or self.checkpoints is None or self.rank:
            return False
        return time.perf_counter() - self._since >= every

    # -- what ------------------------------------------------------------------------------------------

    def save(self, step: int, *, epoch: int, meta: dict[str, Any], wait: bool = False) -> None:
        if self.checkpoints is None:
            return
        self._since = time.perf_counter()
        blocked = self.checkpoints.save(step, epoch, meta, wait)
        self.last_step = step
        self.events.write("saving", step=step, blocked=round(blocked, 6))
        self.harvest()

    def harvest(self) -> None:
        """Tell of saves that have ended."""
        if self.checkpoints is None:
            return
        self._tell(self.checkpoints.harvest())

    def _tell(self, ended: list[Saved]) -> None:
        for saved in ended:
            if saved.complete:
                self.events.write(
                    "saved", step=saved.step, folder=str(saved.folder), seconds=round(saved.seconds, 6)
                )
            else:
                self.failed_step = saved.step
                self.events.write("save_failed", step=saved.step, error=saved.error)

    # -- the last training boundary --------------------------------------------------------------------

    def hold(self) -> None:
        """Remember what may change after the loop (schedulers, learning rates, random numbers).

        A stop during evaluation must save the state of the last boundary: what follows the loop is done again
        after the resume, and must not have been done before. Weights and moments do not change in evaluation.
        """
        if self.checkpoints is None:
            return
        self._held, self._held_randomness = {}, rng.capture()
        self._held_norms = self._norms()
        for name, thing in self._objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._held[name] = [_without_parameters(group) for group in thing.param_groups]
            elif not isinstance(thing, torch.nn.Module) and not hasattr(thing, "micro_batches"):
                state = thing.state_dict()
                if _tensor_bytes(state) <= SMALL:
                    self._held[name] = copy.deepcopy(state)

    def has_other_weights(self) -> bool:
        """Whether the models' weights are not those of the last boundary."""
        if self._held_randomness is None or self.checkpoints is None:
            return False
        return [each.item() for each in self._held_norms] != [each.item() for each in self._norms()]

    def _norms(self) -> list[torch.Tensor]:
        """What tells weights from other weights: a number for each parameter, left on the device."""
        models = [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]
        parameters: list[Any] = []
        for model in models:
            names = [name for name, _ in model.named_parameters()]
            state = (
                model.state_dict()
            )  # not the parameters themselves: after a forward FSDP may hold them whole
            parameters += [state[name] for name in names if isinstance(state.get(name), torch.Tensor)]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in parameters]
        known = [each for each in local if each.dtype in NORMED]
        return list(torch._foreach_norm(known)) if known else []

    def put_back(self) -> None:
        """Return to the last boundary."""
        for name, state in copy.deepcopy(self._held).items():
            thing = self._objects[name]
            if isinstance(thing, torch.optim.Optimizer):
                for group, held in zip(thing.param_groups, state, strict=True):
                    group.update(held)
            else:
                thing.load_state_dict(state)
        if self._held_randomness is not None:
            rng.restore(self._held_randomness)

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Within: as it was at the last boundary, if that is held; afterwards as it is now."""
        if self._held_randomness is None:
            yield
            return
        boundary, norms = (self._held, self._held_randomness), self._held_norms
        self.hold()
        now = self._held, self._held_randomness
        (self._held, self._held_randomness), self._held_norms = boundary, norms
        self.put_back()
        try:
            yield
        finally:
            self._held, self._held_randomness = now
            self.put_back()
            self._held, self._held_randomness = boundary

    def release(self) -> None:
        self._held, self._held_randomness = {}, None

    def close(self, *, wait: bool) -> None:
        if self.checkpoints is not None:
            self._tell(self.checkpoints.close(wait=wait))
            self.checkpoints = None


def warn(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


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
