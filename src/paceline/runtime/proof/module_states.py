"""The state of all modules of a process, also of those that no optimizer trains: averages of
weights, statistics.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.runtime.proof.fingerprints import weights_digest


def digest_modules() -> dict[str, list[int]]:
    """Return digests of the parameters and buffers of modules that are no part of another one, by
    what they are.

    Modules of one kind have one list, in the order of the digests: nothing else tells them apart.
    No rank waits for another one here: of a tensor that is sharded, this rank's part counts.
    """
    gc.collect()
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for each in every for child in each.__dict__.get("_modules", {}).values()}
    found: dict[str, list[int]] = {}
    for module in every:
        if id(module) not in parts and "_modules" in module.__dict__:
            named = list(_tensors(module))
            if named:
                shape = repr([(name, tuple(tensor.shape)) for name, tensor in named])
                kind = f"{type(module).__name__} {zlib.crc32(shape.encode()):08x}"
                found.setdefault(kind, []).append(weights_digest([tensor for _, tensor in named]))
    return {kind: sorted(digests) for kind, digests in found.items()}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        tensor: Any = value.to_local() if hasattr(value, "to_local") else value
        is_plain = (
            tensor.layout is torch.strided and not tensor.is_quantized and not is_lazy(tensor)
        )
        if is_plain and tensor.device.type != "meta":
            yield name, tensor
