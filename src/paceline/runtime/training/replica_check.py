"""Check that replicas stay the same: ranks compare a checksum of their parameters, and how often
optimizers stepped.

DDP gives every rank the same gradients, so the same weights, bit for bit. A gradient that was not
reduced, a weight that one rank alone has changed, or a hardware fault ends that, and nothing else
would notice. The checksum is computed on the device after a step, and moves on by one stage at each
consensus: copied to the host, gathered, compared. No step waits for it. Before a save, all of that
happens at once, so that no checkpoint mixes replicas that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ReplicasDiffer
from paceline.runtime.console import format_ranks
from paceline.runtime.training.checksum import Checksum, is_comparable
from paceline.runtime.training.ddp import DDPModel
from paceline.runtime.training.wrap import Wrapper


@dataclass(frozen=True)
class Replica:
    """A tensor that all ranks have."""

    name: str  # as error messages show it
    tensor: torch.Tensor  # of this rank
    is_step_count: bool = False


class ReplicaCheck:
    """Compares replicas about every `every` steps. Does nothing with a single rank, or if `every`
    is 0.
    """

    def __init__(self, wrapper: Wrapper, *, group: Any, every: int) -> None:
        self.on = group is not None and every > 0
        self.optimizers: Callable[[], Iterable[Any]] = tuple  # those that `run.update` has stepped
        self._wrapper = wrapper
        self._group = group
        self._every = every
        self._objects: dict[str, Any] = {}
        self._due = 0
        self._computing: tuple[int, Checksum] | None = None
        self._gathering: tuple[int, list[torch.Tensor], Any] | None = None

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Take names and further optimizers from what `run.resume` got."""
        self._objects.update(objects)

    # -- stages, called on all ranks at the same boundaries
    # --------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a check of the state after this step, if one is due."""
        if step >= self._due and self._computing is None:
            self._compute(step)

    def advance(self) -> None:
        """Move on by one stage. Raises ReplicasDiffer on all ranks if the last comparison found a
        difference.
        """
        self._compare()
        self._gather()

    def check_now(self, step: int) -> None:
        """Check the current state before a save, or at the end. Waits for all ranks."""
        if not self.on:
            return
        self._compare()
        self._compute(step)
        self._gather()
        self._compare()

    def finish(self, step: int) -> None:
        """Check the state at the end, and leave nothing in flight."""
        self.advance()
        self.check_now(step)

    def _compute(self, step: int) -> None:
        self._due = step + self._every
        self._computing = (step, Checksum(each.tensor for each in self._replicas()))

    def _gather(self) -> None:
        if self._computing is None:
            return
        step, checksum = self._computing
        self._computing = None
        own = torch.tensor(checksum.value())
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        self._gathering = (step, gathered, work)

    def _compare(self) -> None:
        if self._gathering is None:
            return
        step, gathered, work = self._gathering
        self._gathering = None
        work.wait()
        if difference := find_difference([each.item() for each in gathered]):
            raise self._error(step, *difference)

    # -- what is compared
    # ------------------------------------------------------------------------------------

    def _replicas(self) -> Iterator[Replica]:
        """Yield the parameters of models that DDP keeps equal on all ranks, and the steps of their
        optimizers.
        """
        names = {id(thing): name for name, thing in self._objects.items()}
        models: list[tuple[Any, Any]] = [
            (each.model, each.ddp) for each in self._wrapper.models if isinstance(each, DDPModel)
        ]
        for thing in self._objects.values():
            if isinstance(thing, DistributedDataParallel):
                models.append((thing.module, thing))
        known: set[int] = set()
        for number, (model, ddp) in enumerate(models):
            if ddp is not None and ddp.process_group.size() != dist.get_world_size():
                continue  # other ranks have other weights
            label = names.get(id(model)) or names.get(id(ddp)) or f"{type(model).__name__} {number}"
            prefix = f"{label}." if len(models) > 1 else ""
            ignored = getattr(ddp, "parameters_to_ignore", ())
            for name, parameter in model.named_parameters():
                known.add(id(parameter))
                is_ignored = name in ignored or f"model.{name}" in ignored
                if not is_ignored and is_comparable(parameter):
                    yield Replica(f"{prefix}{name}", parameter)
        optimizers = {
            id(each): each
            for each in (*self.optimizers(), *self._objects.values())
            if hasattr(each, "param_groups") and hasattr(each, "state")
        }
        for number, optimizer in enumerate(optimizers.values()):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            if parameters and all(id(each) in known for each in parameters):
                label = names.get(id(optimizer)) or f"{type(optimizer).__name__} {number}"
                yield Replica(label, _step_count(optimizer, parameters), is_step_count=True)

    # -- the error
    # -------------------------------------------------------------------------------------------

    def _error(self, step: int, most: list[int], others: list[int]) -> ReplicasDiffer:
        """Return the error that names the first difference. Waits for all ranks, which all have
        found it.
        """
        own: dict[str, tuple[int, float | None]] = {}
        # Step counts first: where they differ, parameters differ as a consequence.
        for each in sorted(self._replicas(), key=lambda each: not each.is_step_count):
            count = each.tensor.item() if each.is_step_count else None
            own[each.name] = (Checksum([each.tensor]).value(), count)
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        where = "The difference has disappeared since"
        for name, (_, count) in own.items():
            if find_difference([each.get(name) for each in gathered]):
                where = f"The first parameter that differs is {name!r}"
                if count is not None:
                    steps = [
                        f"{gathered[ranks[0]][name][1]:.0f} on {format_ranks(ranks)}"
                        for ranks in (most, others)
                    ]
                    where = f"The optimizer {name!r} has stepped {', but '.join(steps)}"
                break
        return ReplicasDiffer(
            f"After step {step}, {format_ranks(others)} no longer "
            f"{'has' if len(others) == 1 else 'have'} the same "
            f"replica as {format_ranks(most)}. {where}.",
            hint="Train with gradients that all ranks share (run.backward and run.update), and "
            "change weights identically on all ranks. This state was not saved. If replicas are "
            "meant to differ, use session(replica_check=0).",
        )


def find_difference(values: list[Any]) -> tuple[list[int], list[int]] | None:
    """Return the ranks that most agree with, and those that differ, if any do."""
    # of equally many, that of the lowest rank
    usual = Counter(values).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(values) if value != usual]
    if not others:
        return None
    return [rank for rank, value in enumerate(values) if value == usual], others


def _step_count(optimizer: Any, parameters: list[Any]) -> torch.Tensor:
    """Return how often an optimizer has stepped, on its device; 0 for those that do not count."""
    states = [optimizer.state.get(each) for each in parameters]
    steps = [state["step"] for state in states if state and "step" in state]
    on_device = [
        each.reshape(()) for each in steps if isinstance(each, torch.Tensor) and not each.is_cpu
    ]
    if on_device:
        return torch.stack(on_device).max().float()
    return torch.tensor(max(map(float, steps), default=0.0))
