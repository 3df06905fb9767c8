"""Check that replicas stay the same: ranks compare a checksum of their parameters.

DDP gives every rank the same gradients, so the same weights, bit for bit. A gradient that was not
reduced, a weight that one rank alone has changed, or a hardware fault ends that, and nothing else
would notice. A check before each save keeps checkpoints free of replicas that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ReplicasDiffer
from paceline.runtime.console import format_ranks
from paceline.runtime.training.checksum import Checksum, is_comparable
from paceline.runtime.training.ddp import DDPModel, ignored_names
from paceline.runtime.training.wrap import Wrapper


class ReplicaCheck:
    """Compares replicas about every `every` steps. Does nothing with a single rank, or if `every`
    is 0.
    """

    def __init__(self, wrapper: Wrapper, *, group: Any, every: int) -> None:
        self.on = group is not None and every > 0
        self._wrapper = wrapper
        self._group = group
        self._every = every
        self._due = 0

    def check_when_due(self, step: int) -> None:
        """Check the state after this step, if a check is due. All ranks call it at the same
        boundaries.
        """
        if step >= self._due:
            self.check_now(step)

    def check_now(self, step: int) -> None:
        """Check the current state. Raises ReplicasDiffer on all ranks if there is a difference."""
        if not self.on:
            return
        self._due = step + self._every
        own = torch.tensor(Checksum(tensor for _, tensor in self._replicas()).value())
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own, group=self._group)
        if difference := find_difference([each.item() for each in gathered]):
            raise self._error(step, *difference)

    def _replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of models that DDP keeps equal on all ranks."""
        models = [each for each in self._wrapper.models if isinstance(each, DDPModel)]
        for number, each in enumerate(models):
            if each.ddp is not None and each.ddp.process_group.size() != dist.get_world_size():
                continue  # other ranks have other weights
            prefix = f"{type(each.model).__name__} {number}." if len(models) > 1 else ""
            ignored = ignored_names(each.model)
            for name, parameter in each.model.named_parameters():
                if name not in ignored and is_comparable(parameter):
                    yield f"{prefix}{name}", parameter

    def _error(self, step: int, most: list[int], others: list[int]) -> ReplicasDiffer:
        """Return the error that names the first difference. Waits for all ranks, which all have
        found it.
        """
        own = {name: Checksum([tensor]).value() for name, tensor in self._replicas()}
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        differing = (name for name in own if find_difference([each.get(name) for each in gathered]))
        return ReplicasDiffer(
            f"After step {step}, {format_ranks(others)} no longer "
            f"{'has' if len(others) == 1 else 'have'} the same replica as {format_ranks(most)}. "
            f"The first parameter that differs is {next(differing, 'unknown')!r}.",
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
