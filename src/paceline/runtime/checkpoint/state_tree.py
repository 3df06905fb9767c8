"""State as a tree: tensors are taken out by name, the rest becomes plain JSON. No pickle, either way.

What JSON has no word for is a one-key object whose key begins with `$`: {"$tensor": name}, {"$tuple": [...]}.
"""

from __future__ import annotations

import base64
import collections
import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.contract.checkpoint.safetensors import DTYPES
from paceline.errors import CheckpointError

PLAIN = (type(None), bool, int, float, str)

TORCH_DTYPES = {short: getattr(torch, long) for long, short in DTYPES.items() if hasattr(torch, long)}
DTYPE_NAMES = {dtype: short for short, dtype in TORCH_DTYPES.items()}


def dtensor_class() -> Any:
    """The DTensor class, if anybody has imported it: else there are none, and its import costs half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def _is_same(known: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Two tensors that begin at the same address: are they one?"""
    return known is not None and (known.shape, known.stride(), known.dtype) == (
        value.shape,
        value.stride(),
        value.dtype,
    )


@dataclass
class Taken:
    """The tensors of a tree, by name: what every rank holds alike, and what is cut over a device mesh."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    _at: dict[int, str] = field(default_factory=dict)  # where a tensor begins in memory -> its first name
    _dtensor: Any = field(default_factory=dtensor_class)

    def take(self, path: str, value: torch.Tensor) -> dict[str, Any]:
        # This runs for every tensor at every save: what can be checked when the layout changes is checked then.
        if self._dtensor is not None and isinstance(value, self._dtensor):
            return self._take_sharded(path, value)
        # Tied parameters are one tensor under two names: saved once. Views that differ in shape are not tied.
        pointer = value.data_ptr() if value.layout is torch.strided else 0
        first = self._at.setdefault(pointer, path) if pointer else path
        if first is not path and _is_same(self.tensors.get(first), value):
            return {"$tensor": first}
        name = path if path not in self.tensors else self._free(path)
        self.tensors[name] = value
        return {"$tensor": name}

    def check(self) -> None:
        """Every tensor is one that a file can hold, or an error names the one that is not."""
        for path, value in {**self.tensors, **self.sharded}.items():
            if value.layout != torch.strided or value.dtype not in DTYPE_NAMES or value.device.type == "meta":
                raise CheckpointError(
                    f"{path} is a {value.layout} tensor of {value.dtype} on {value.device}: no checkpoint holds that",
                    hint="return a plain dense tensor from state_dict()",
                )

    def _take_sharded(self, path: str, value: Any) -> dict[str, Any]:
        name = self._free(path)
        self.sharded[name] = value
        placements = [f"S{each.dim}" if each.is_shard() else "R" for each in value.placements]
        return {
            "$sharded": name,
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "placements": placements,
        }

    def _free(self, path: str) -> str:
        """Keys 0 and "0" of one dictionary read alike in a path."""
        while path in self.tensors or path in self.sharded:
            path += "'"
        return path


def encode(value: Any, path: str, take: Callable[[str, torch.Tensor], dict[str, Any]]) -> Any:
    """A tree as JSON, its tensors handed to `take`, which says what stands in their place."""
    kind = type(value)
    if kind is torch.Tensor:
        return take(path, value.detach() if value.requires_grad else value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return take(path, value.detach())
    if isinstance(value, collections.Counter):
        return {"$counter": [[encode(key, path, take), count] for key, count in value.items()]}
    if isinstance(value, dict):
        return _encode_dict(value, path, take)
    if kind is list:
        return [encode(each, f"{path}/{index}", take) for index, each in enumerate(value)]
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, tuple):
        return {"$tuple": [encode(each, f"{path}/{index}", take) for index, each in enumerate(value)]}
    if kind in (set, frozenset):
        return {"$set": [encode(each, path, take) for each in value]}
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [value.real, value.imag]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if isinstance(value, PLAIN):  # an IntEnum, a str subclass: its value is what counts
        return next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
    return _encode_numpy(value, path, take)


def _encode_dict(
    value: dict[Any, Any], path: str, take: Callable[[str, torch.Tensor], dict[str, Any]]
) -> Any:
    for key in value:
        if type(key) is not str or key[:1] == "$":
            break
    else:
        return {key: encode(each, f"{path}/{key}", take) for key, each in value.items()}
    return {
        "$dict": [
            [encode(key, path, take), encode(each, f"{path}/{key}", take)] for key, each in value.items()
        ]
    }


def _encode_numpy(value: Any, path: str, take: Callable[[str, torch.Tensor], dict[str, Any]]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$ndarray": take(path, torch.from_numpy(value.copy()))}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$number": [value.dtype.str, encode(value.item(), path, take)]}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold",
        hint="return tensors, numbers, strings, lists, tuples, sets and dicts from state_dict(), nothing else",
    )


def decode(value: Any, fetch: Callable[[dict[str, Any]], Any]) -> Any:
    """The tree again; `fetch` gives a tensor for what stood in its place."""
    if type(value) is list:
        return [decode(each, fetch) for each in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(each, fetch) for key, each in value.items()}
    if tag in ("$tensor", "$sharded", "$inline"):
        return fetch(value)
    body = value[tag]
    return DECODERS[tag](body, lambda each: decode(each, fetch))


def references(value: Any) -> Iterator[dict[str, Any]]:
    """What stands in the place of tensors, in the order of the tree."""
    if type(value) is list:
        for each in value:
            yield from references(each)
    elif type(value) is dict:
        if "$tensor" in value or "$sharded" in value:
            yield value
        else:
            yield from references(list(value.values()))


def _number(body: Any, _: Callable[[Any], Any]) -> Any:
    import numpy

    return numpy.dtype(body[0]).type(body[1] if type(body[1]) is not dict else complex(*body[1]["$complex"]))


DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$dict": lambda body, inner: {inner(key): inner(each) for key, each in body},
    "$tuple": lambda body, inner: tuple(inner(each) for each in body),
    "$set": lambda body, inner: {inner(each) for each in body},
    "$counter": lambda body, inner: collections.Counter({inner(key): count for key, count in body}),
    "$size": lambda body, _: torch.Size(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$complex": lambda body, _: complex(*body),
    "$dtype": lambda body, _: getattr(torch, body),
    "$device": lambda body, _: torch.device(body),
    "$ndarray": lambda body, inner: inner(body).numpy(),
    "$number": _number,
}


def inline(path: str, value: torch.Tensor) -> dict[str, Any]:
    """For the state of one rank (a generator's state, a loader's): small tensors stand in the text itself."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "$inline": base64.b64encode(ctypes.string_at(flat.data_ptr(), flat.numel())).decode(),
        "dtype": DTYPE_NAMES[value.dtype],
        "shape": list(value.shape),
    }


def outline(entry: dict[str, Any]) -> torch.Tensor:
    """The tensor that `inline` put into the text."""
    raw = bytearray(base64.b64decode(entry["$inline"]))
    dtype = TORCH_DTYPES[entry["dtype"]]
    if not raw:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(entry["shape"])
