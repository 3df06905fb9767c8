"""Give a model that was built on the meta device its memory and its initial values.

Sharded models are initialized one FSDP2 block at a time: each rank computes the whole block from
the same random numbers, and keeps its shard. So the values do not depend on the number of ranks,
and none ever holds the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.runtime.checkpoint.sharded import shard_like
from paceline.runtime.randomness import derive_seed, preserve_host_rng, seed_host

MAX_NAMES_SHOWN = 5  # in an error


@dataclass
class MetaTensor:
    """A parameter or buffer without values. Tied ones have several slots: tables of modules, and
    the keys there.
    """

    name: str
    module: nn.Module  # the first that holds it
    slots: list[tuple[dict[str, Any], str]]

    @property
    def value(self) -> Any:
        table, key = self.slots[0]
        return table[key]

    @value.setter
    def value(self, value: Any) -> None:
        for table, key in self.slots:
            table[key] = value


def find_meta_tensors(model: nn.Module) -> list[MetaTensor]:
    """Return all parameters and buffers on the meta device."""
    found: dict[int, MetaTensor] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is not None and value.is_meta:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault(id(value), MetaTensor(name, module, [])).slots.append(
                        (table, key)
                    )
    return list(found.values())


def allocate(model: nn.Module, tensors: list[MetaTensor], device: torch.device) -> None:
    """Allocate memory on the device for all tensors, with undefined values. Tied ones stay tied."""
    # FSDP2 overrides this method, and learns about its new parameters there; `to_empty` calls it as
    # well.
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    for tensor in tensors:
        tensor.value = tensor.value  # one object in all slots


def initialize(
    model: nn.Module,
    tensors: list[MetaTensor],
    *,
    blocks: list[nn.Module],
    init: Callable[[Any], Any] | None,
    seed: int,
    device: torch.device,
) -> None:
    """Compute the initial values of all tensors. The same seed gives the same values on all ranks.

    For each module, children first, this calls its `reset_parameters`, as constructors do, and then
    `init`.

    Raises UsageError if a tensor still has no values, or if a module changes parameters of a block
    that it contains.
    """
    numbers = {id(module): number for number, module in enumerate(model.modules())}

    def run_steps(modules: list[nn.Module]) -> None:
        for step in (_reset, init) if init is not None else (_reset,):
            for module in modules:
                _seed(seed, numbers[id(module)])
                step(module)

    missing: list[str] = []
    *inner, outer = _units(model, blocks)
    with torch.no_grad(), torch.device(device), _preserve_rng(device):
        for modules in inner:
            missing += _fill(_tensors_of(modules, tensors), partial(run_steps, modules))
        own = _tensors_of(outer, tensors)
        names = {each.name for each in own} | set(missing)
        before = {
            each.name: (each, _fingerprint(each.value))
            for each in tensors
            if each.name not in names
        }
        missing += _fill(own, partial(run_steps, outer))
        changed = [name for name, (each, old) in before.items() if _fingerprint(each.value) != old]
    if missing:
        raise _missing_error(missing)
    if changed:
        raise _changed_error(changed[0])


def _tensors_of(modules: list[nn.Module], tensors: list[MetaTensor]) -> list[MetaTensor]:
    inside = {id(module) for module in modules}
    return [tensor for tensor in tensors if id(tensor.module) in inside]


def _fill(tensors: list[MetaTensor], run_steps: Callable[[], None]) -> list[str]:
    """Initialize these tensors, and return the names of those that have no values after that."""
    with _whole(tensors):
        run_steps()
        return [tensor.name for tensor in tensors if not _has_values(tensor.value)]


def _units(model: nn.Module, blocks: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield the modules of each outermost block, and then those outside of all blocks; children
    before parents.
    """
    seen: set[int] = set()
    for block in blocks:
        nested = [each for each in _children_first(block) if id(each) not in seen]
        seen.update(id(each) for each in nested)
        if nested:
            yield nested
    yield [each for each in _children_first(model) if id(each) not in seen]


def _children_first(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    module.apply(found.append)
    return list(dict.fromkeys(found))


def _reset(module: nn.Module) -> None:
    """Call what the constructors of torch's own modules call."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


def _seed(seed: int, number: int) -> None:
    """Seed a module by its number, so that its values do not depend on the order in which blocks
    are initialized.
    """
    derived = derive_seed(seed, number)
    torch.manual_seed(derived)
    seed_host(derived)


@contextlib.contextmanager
def _preserve_rng(device: torch.device) -> Iterator[None]:
    indices = [] if device.type == "cpu" or device.index is None else [device.index]
    with (
        preserve_host_rng(),
        torch.random.fork_rng(indices, device_type=device.type if indices else "cuda"),
    ):
        yield


@contextlib.contextmanager
def _whole(tensors: list[MetaTensor]) -> Iterator[None]:
    """Put whole tensors without values in the place of these; at the end, keep this rank's shards
    of what is there.
    """
    shards = [tensor.value for tensor in tensors]
    for tensor, shard in zip(tensors, shards, strict=True):
        if hasattr(shard, "device_mesh"):
            whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            is_parameter = isinstance(shard, nn.Parameter)
            tensor.value = (
                nn.Parameter(whole, requires_grad=shard.requires_grad) if is_parameter else whole
            )
        _erase(tensor.value)
    yield
    for tensor, shard in zip(tensors, shards, strict=True):
        if hasattr(shard, "device_mesh"):
            shard.to_local().copy_(shard_like(tensor.value.detach(), shard).to_local())
            tensor.value = shard
        # a buffer that was computed on the CPU, and assigned
        elif tensor.value.device != shard.device:
            tensor.value = tensor.value.to(shard.device)


def _erase(tensor: torch.Tensor) -> None:
    """Fill a tensor with what no initialization writes, or note that nothing was written yet."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor._paceline_version = tensor._version  # type: ignore[attr-defined]


def _has_values(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return getattr(tensor, "_paceline_version", None) != tensor._version


def _missing_error(names: list[str]) -> UsageError:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return UsageError(
        "The model was built on the meta device, and nothing initializes "
        f"{', '.join(names[:MAX_NAMES_SHOWN])}{more}.",
        hint="What a constructor computes is lost there, such as tables in buffers. Compute it in "
        "a method "
        "reset_parameters of the module, or pass init=f: f(module) is called for each module.",
    )


def _changed_error(name: str) -> UsageError:
    return UsageError(
        f"The initialization of another module changes {name}. That does not work on the meta "
        "device: blocks are "
        "initialized one at a time, and an inner block is already sharded when the block that "
        "contains it is "
        "initialized.",
        hint="Set it in a reset_parameters method within its own block, or in init(module) when "
        "init is called for "
        "that block.",
    )


def _fingerprint(tensor: Any) -> tuple[int, float]:
    """Return what changes when an initialization writes to a tensor, also by way of its `data`."""
    local = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    return tensor._version, float(local.sum()) if local.is_floating_point() else 0.0
