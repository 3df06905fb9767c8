"""Check that replicas stay the same: ranks compare a checksum of their parameters, and how often
optimizers stepped.

DDP gives every rank the same gradients, so the same weights, bit for bit. A gradient that was not
reduced, a weight that one rank alone has changed, or a hardware fault ends that, and nothing else
would notice. The checksum is computed on the device after a step, and moves on by one stage at each
consensus: copied to the host, gathered, compared. No step waits for it. Before a save, all of that
happens at once, so that no checkpoint mixes replicas that differ.

Only ranks with the same `leader` are compared: the lowest of those that hold the same replica. For
DDP, these are the ranks of its process group. A DTensor is replicated along some dimensions of its
mesh, and sharded along the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ReplicasDiffer
from paceline.runtime.console import format_ranks
from paceline.runtime.training.checksum import Checksum, is_comparable
from paceline.runtime.training.ddp import DDPModel
from paceline.runtime.training.wrap import LocalModel, Wrapper

MAX_PARTS = 8  # sets of replicas that share their ranks; almost always there is one
NO_PART = -1
WORLD: tuple[Hashable, int] = ("world", 0)  # the part of what all ranks have, and its leader

REPLICATE = "replicate"  # the dimension of a mesh along which gradients are averaged

Digests = list[list[tuple[int, int]]]  # by rank: leader and checksum of each part


@dataclass(frozen=True)
class Replica:
    """A tensor that other ranks have as well."""

    name: str  # as error messages show it
    tensor: torch.Tensor  # of this rank
    part: Hashable  # the same for all tensors that are replicated over the same ranks
    leader: int
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
        self._computing: tuple[int, dict[Hashable, tuple[int, Checksum]]] | None = None
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
        parts: dict[Hashable, tuple[int, list[torch.Tensor]]] = {}
        for replica in self._replicas():
            parts.setdefault(replica.part, (replica.leader, []))[1].append(replica.tensor)
        self._computing = (
            step,
            {key: (leader, Checksum(tensors)) for key, (leader, tensors) in parts.items()},
        )

    def _gather(self) -> None:
        if self._computing is None:
            return
        step, parts = self._computing
        self._computing = None
        numbers = [
            number for leader, checksum in parts.values() for number in (leader, checksum.value())
        ]
        numbers = [*numbers, *[NO_PART, 0] * MAX_PARTS][: 2 * MAX_PARTS]
        own = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._gathering = (
            step,
            gathered,
            dist.all_gather(gathered, own, group=self._group, async_op=True),
        )

    def _compare(self) -> None:
        if self._gathering is None:
            return
        step, gathered, work = self._gathering
        self._gathering = None
        work.wait()
        numbers = [each.tolist() for each in gathered]
        digests: Digests = [list(zip(each[::2], each[1::2], strict=True)) for each in numbers]
        if difference := find_difference(digests):
            raise self._error(step, *difference)

    # -- what is compared
    # ------------------------------------------------------------------------------------

    def _replicas(self) -> Iterator[Replica]:
        """Yield the parameters of models that are shared between ranks, and the steps of their
        optimizers.
        """
        names = {id(thing): name for name, thing in self._objects.items()}
        models: list[tuple[Any, Any, tuple[Hashable, int] | None]] = []
        for each in self._wrapper.models:
            if isinstance(each, DDPModel):
                models.append((each.model, each.ddp, _ddp_part(each.ddp)))
            elif not isinstance(each, LocalModel):  # FSDP2 shares nothing but its DTensors
                models.append((each.model, None, None))
        for thing in self._objects.values():
            if isinstance(thing, DistributedDataParallel):
                models.append((thing.module, thing, _ddp_part(thing)))
        parts: dict[int, tuple[Hashable, int]] = {}  # by parameter, for their optimizers
        for number, (model, ddp, own) in enumerate(models):
            label = names.get(id(model)) or names.get(id(ddp)) or f"{type(model).__name__} {number}"
            prefix = f"{label}." if len(models) > 1 else ""
            ignored = _ignored_names(ddp)
            for name, parameter in model.named_parameters():
                parts[id(parameter)] = own or WORLD
                if name not in ignored:
                    yield from _replica_of(f"{prefix}{name}", parameter, own)
        optimizers = {
            id(each): each
            for each in (*self.optimizers(), *self._objects.values())
            if _is_optimizer(each)
        }
        for number, optimizer in enumerate(optimizers.values()):
            found = [parts.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
            if found and None not in found:
                label = names.get(id(optimizer)) or f"{type(optimizer).__name__} {number}"
                part, leader = found[0] or WORLD
                yield Replica(label, _step_count(optimizer), part, leader, is_step_count=True)

    # -- the error
    # -------------------------------------------------------------------------------------------

    def _error(self, step: int, most: list[int], others: list[int]) -> ReplicasDiffer:
        """Return the error that names the first difference. Waits for all ranks, which all have
        found it.
        """
        own: dict[str, tuple[int, int, float | None]] = {}
        # Step counts first: where they differ, parameters differ as a consequence.
        for each in sorted(self._replicas(), key=lambda each: not each.is_step_count):
            count = each.tensor.item() if each.is_step_count else None
            own[each.name] = (each.leader, Checksum([each.tensor]).value(), count)
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        where = "The difference has disappeared since"
        for name in dict.fromkeys(name for each in gathered for name in each):
            digests = [[each[name][:2] if name in each else (NO_PART, 0)] for each in gathered]
            if find_difference(digests):
                where = f"The first parameter that differs is {name!r}"
                counts = [each[name][2] if name in each else None for each in gathered]
                if counts[most[0]] is not None:
                    steps = [
                        f"{counts[ranks[0]]:.0f} on {format_ranks(ranks)}"
                        for ranks in (most, others)
                    ]
                    where = f"The optimizer {name!r} has stepped {', but '.join(steps)}"
                break
        return ReplicasDiffer(
            f"After step {step}, {format_ranks(others)} no longer "
            f"{'has' if len(others) == 1 else 'have'} the same "
            f"replica as {format_ranks(most)}. {where}.",
            hint="Train with gradients that all ranks share (run.backward and run.update), and "
            "change weights "
            "identically on all ranks. This state was not saved. If replicas are meant to differ, "
            "use "
            "session(replica_check=0).",
        )


def find_difference(digests: Digests) -> tuple[list[int], list[int]] | None:
    """Return the ranks that most agree with, and those that differ, of the first part whose
    replicas differ.
    """
    for part in zip(*digests, strict=True):
        groups: dict[int, dict[int, int]] = {}
        for rank, (leader, digest) in enumerate(part):
            if leader != NO_PART:
                groups.setdefault(leader, {})[rank] = digest
        for found in groups.values():
            # of equally many, that of the lowest rank
            (usual, _), *rest = Counter(found.values()).most_common()
            if rest:
                most = [rank for rank, digest in found.items() if digest == usual]
                return most, [rank for rank in found if rank not in most]
    return None


def _replica_of(name: str, parameter: Any, own: tuple[Hashable, int] | None) -> Iterator[Replica]:
    if hasattr(parameter, "placements"):  # a DTensor
        mesh = parameter.device_mesh
        # Only copies whose gradients are averaged. Tensor-parallel ranks compute those of a
        # replicated layer each on their own, and may round differently.
        averaged = mesh.mesh_dim_names or [REPLICATE] * mesh.ndim
        replicated = tuple(
            dim
            for dim, each in enumerate(parameter.placements)
            if each.is_replicate() and averaged[dim] == REPLICATE
        )
        leader = mesh_leader(mesh, replicated)
        local = parameter.detach().to_local()
        if leader is not None and is_comparable(local):
            yield Replica(name, local, (mesh, replicated), leader)
    elif own is not None and is_comparable(parameter):
        yield Replica(name, parameter, *own)


def mesh_leader(mesh: Any, replicated: tuple[int, ...]) -> int | None:
    """Return the lowest rank of the mesh that holds the same shard as this one; None if no other
    rank does.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    index = tuple(slice(None) if dim in replicated else each for dim, each in enumerate(coordinate))
    ranks = mesh.mesh[index].reshape(-1)
    return int(ranks.min()) if len(ranks) > 1 else None


def _ddp_part(ddp: DistributedDataParallel | None) -> tuple[Hashable, int]:
    """Return the part that DDP replicates its parameters in, and its leader."""
    ranks = [] if ddp is None else dist.get_process_group_ranks(ddp.process_group)
    return (
        WORLD
        if ddp is None or len(ranks) == dist.get_world_size()
        else (ddp.process_group, min(ranks))
    )


def _ignored_names(ddp: Any) -> set[str]:
    """Return the names of parameters that DDP was told to ignore, without the prefix of the module
    around the model.
    """
    return {name.removeprefix("model.") for name in getattr(ddp, "parameters_to_ignore", ())}


def _is_optimizer(thing: Any) -> bool:
    return hasattr(thing, "param_groups") and hasattr(thing, "state")


def _step_count(optimizer: Any) -> torch.Tensor:
    """Return how often an optimizer has stepped, on its device; 0 for those that do not count."""
    states = [
        optimizer.state.get(each) for group in optimizer.param_groups for each in group["params"]
    ]
    steps = [state["step"] for state in states if state and "step" in state]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in steps]
    on_device = [
        each.reshape(()) for each in local if isinstance(each, torch.Tensor) and not each.is_cpu
    ]
    if on_device:
        return torch.stack(on_device).max().float()
    return torch.tensor(max(map(float, local), default=0.0))
