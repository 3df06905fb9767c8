"""State as a tree: tensors are stored by name, everything else becomes plain JSON. Nothing is
pickled.

A value that JSON can't express is an object whose first key starts with `$`: {"$tensor": name},
{"$tuple": [...]}.
"""

from __future__ import annotations

import base64
import collections
import ctypes
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.safetensors import DTYPE_NAMES, TORCH_DTYPES
from paceline.runtime.checkpoint.sharded import dtensor_class, own_part

PLAIN = (type(None), bool, int, float, str)

METADATA_KEY = "$metadata"  # next to the trees of objects: versions of the classes of modules

MAX_SAMPLE = 1 << 16  # elements of an object's tensors that ranks compare
MIN_SAMPLE = 64  # of each tensor
MAX_INLINE = 1 << 16  # bytes; larger tensors of one rank go into its share of the tensors

# takes a tensor and its path, returns a reference to it
Store = Callable[[str, torch.Tensor], dict[str, Any]]


@dataclass
class StateTensors:
    """The tensors of a tree by name: replicated ones, this rank's own, which are also its parts of
    sharded ones, and those sharded over a device mesh.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    # replicated ones that may differ: rank 0 writes them alone
    rank_zero: set[str] = field(default_factory=set)
    rank: int = 0
    # a tensor's address -> the name of the first one stored there
    _names: dict[int, str] = field(default_factory=dict)
    _dtensor: Any = field(default_factory=dtensor_class)

    def store(self, path: str, value: torch.Tensor) -> dict[str, Any]:
        """Add a tensor and return the reference that replaces it in the tree."""
        # This runs for every tensor at every save; `check` only runs when the layout changes.
        if self._dtensor is not None and isinstance(value, self._dtensor):
            return self._store_sharded(path, value)
        # Tied parameters are one tensor with two names, saved once. Views of different shapes are
        # not tied.
        value = _materialize(value)
        pointer = value.data_ptr() if value.layout is torch.strided else 0
        first = self._names.get(pointer)
        if first is not None and _is_same(self.tensors[first], value):
            return {"$tensor": first}
        name = path if path not in self.tensors else self._unused_name(path)
        self.tensors[name] = value
        if pointer and first is None:
            self._names[pointer] = name
        return {"$tensor": name}

    def store_own(self, path: str, value: torch.Tensor) -> dict[str, Any]:
        """Add a tensor of this rank alone. Small ones are encoded in the JSON itself: their shapes
        may change.
        """
        if self._dtensor is not None and isinstance(value, self._dtensor):
            raise CheckpointError(
                f"{path} is sharded over the ranks, so it can't be saved per rank.",
                hint="Leave it out of per_rank.",
            )
        value = _materialize(value)
        if _can_be_saved(value) and value.nbytes <= MAX_INLINE:
            return store_inline(path, value)
        while own_name(path, self.rank) in self.own:
            path += "'"
        self.own[own_name(path, self.rank)] = value
        return {"$tensor": path}

    @property
    def in_share(self) -> dict[str, torch.Tensor]:
        """The tensors that ranks write into their shares."""
        return {**self.tensors, **self.own} if self.own else self.tensors

    def check(self) -> None:
        """Raise an error that names the first tensor that can't be saved."""
        for path, value in {**self.in_share, **self.sharded}.items():
            if not _can_be_saved(value):
                raise CheckpointError(
                    f"{path} is a {value.layout} tensor of {value.dtype} on {value.device}, which "
                    "can't be saved.",
                    hint="Return a plain dense tensor from state_dict().",
                )

    def _store_sharded(self, path: str, value: Any) -> dict[str, Any]:
        name = self._unused_name(path)
        self.sharded[name] = value
        self.own.update(own_part(name, value))
        # Two dimensions of the mesh may shard one of the tensor, in a class of placements that is
        # no Shard.
        placements = [f"S{each.dim}" if hasattr(each, "dim") else "R" for each in value.placements]
        return {
            "$sharded": name,
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "placements": placements,
        }

    def _unused_name(self, path: str) -> str:
        """Return the path, or a variant of it: keys 0 and "0" of a dictionary have the same
        path.
        """
        while path in self.tensors or path in self.sharded:
            path += "'"
        return path


def own_name(path: str, rank: int) -> str:
    """Return the name under which a rank stores a tensor of its own."""
    return f"{path}@{rank}"


def _can_be_saved(value: torch.Tensor) -> bool:
    return (
        value.layout == torch.strided and value.dtype in DTYPE_NAMES and value.device.type != "meta"
    )


def _materialize(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: that of a conjugated view holds others."""
    is_view = value.is_conj() or value.is_neg()
    return value.resolve_conj().resolve_neg() if is_view else value


def _is_same(known: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors that start at the same address are the same."""
    return (known.shape, known.stride(), known.dtype) == (value.shape, value.stride(), value.dtype)


@dataclass
class ObjectStates:
    """The state of all registered objects: trees in JSON, and the tensors they refer to."""

    tensors: StateTensors = field(default_factory=StateTensors)
    # trees of objects that all ranks share
    replicated: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)  # trees of this rank's own objects
    kinds: dict[str, str] = field(default_factory=dict)

    def comparable(self, name: str, thing: Any) -> tuple[Any, list[torch.Tensor]]:
        """Return the plain values and the tensors of an object that should be the same on all
        ranks.

        Of a module, these are its parameters: buffers, such as the statistics of BatchNorm, may
        differ, and rank 0's count. Sharded tensors differ by design.
        """
        names = [each for each in self.tensors.tensors if each.startswith(f"{name}/")]
        tensors = [self.tensors.tensors[each] for each in sorted({*names} - self.tensors.rank_zero)]
        is_sharded = any(each.startswith(f"{name}/") for each in self.tensors.sharded)
        if is_sharded or isinstance(thing, torch.nn.Module):
            return None, tensors
        return self.per_rank.get(name, self.replicated.get(name)), tensors


def collect(
    objects: Mapping[str, Any], *, per_rank: Collection[str] = (), rank: int = 0
) -> ObjectStates:
    """Return the state of the objects; those named in `per_rank` have one of their own on each
    rank.
    """
    states = ObjectStates(StateTensors(rank=rank))
    tensors = states.tensors
    for name, thing in objects.items():
        kind = "rank" if name in per_rank else kind_of(thing)
        plain, sharded = len(tensors.tensors), len(tensors.sharded)
        state = thing.state_dict()
        tree = encode(state, name, tensors.store_own if kind == "rank" else tensors.store)
        # State without tensors is small, so every rank saves its own copy.
        if kind == "state" and (len(tensors.tensors), len(tensors.sharded)) == (plain, sharded):
            kind = "rank"
        # Nothing compares buffers, nor what an object stores besides sharded tensors.
        if kind == "module" or len(tensors.sharded) > sharded:
            parameters = (
                {f"{name}/{key}" for key, _ in thing.named_parameters()}
                if kind == "module"
                else set()
            )
            tensors.rank_zero.update(set(islice(tensors.tensors, plain, None)) - parameters)
        if kind == "module":
            _add_metadata(states, name, state, path=f"{name}/_metadata")
        states.kinds[name] = kind
        (states.per_rank if kind == "rank" else states.replicated)[name] = tree
    return states


def _add_metadata(states: ObjectStates, name: str, state: Any, *, path: str) -> None:
    """Keep the versions of a module's classes that differ from the default."""
    metadata = getattr(state, "_metadata", None) or {}
    versions = {key: value for key, value in metadata.items() if value != {"version": 1}}
    if versions:
        encoded = encode(versions, path, states.tensors.store)
        states.replicated.setdefault(METADATA_KEY, {})[name] = encoded


def kind_of(thing: Any) -> str:
    """Return what an object is: "module", "optimizer", "state", or "rank" if each rank has its own
    state.
    """
    if is_loader(thing):
        return "rank"
    if isinstance(thing, torch.nn.Module):
        return "module"
    return "optimizer" if hasattr(thing, "param_groups") else "state"


def is_loader(thing: Any) -> bool:
    """Return whether this is a loader from `run.loader`, which resumes on any number of ranks by
    itself.
    """
    return hasattr(thing, "micro_batches")


def unwrap(thing: Any) -> Any:
    """Return the user's own module: wrappers prefix every key, and differ between world sizes."""
    while True:
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(thing, torch.nn.Module) and "_orig_mod" in thing._modules:
            thing = thing._modules["_orig_mod"]
        else:
            return thing


def encode(value: Any, path: str, store: Store) -> Any:
    """Return a tree as JSON, with the references that `store` returns instead of tensors."""
    kind = type(value)
    if kind is torch.Tensor:
        return store(path, value.detach() if value.requires_grad else value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):  # of a lazy module
            return {"$lazy": "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"}
        return store(path, value.detach())
    if isinstance(value, collections.Counter):
        return {"$counter": [[encode(key, path, store), count] for key, count in value.items()]}
    if isinstance(value, dict):
        return _encode_dict(value, path, store)
    if kind is list:
        return [encode(item, f"{path}/{index}", store) for index, item in enumerate(value)]
    if kind in ENCODERS:
        tag, convert = ENCODERS[kind]
        return {tag: convert(value)}
    if isinstance(value, tuple):
        return {
            "$tuple": [encode(item, f"{path}/{index}", store) for index, item in enumerate(value)]
        }
    if kind in (set, frozenset):
        return {"$set": [encode(item, path, store) for item in value]}
    if isinstance(value, PLAIN):  # a subclass such as an IntEnum: its value is what matters
        return next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
    return _encode_numpy(value, path, store)


def _encode_dict(value: dict[Any, Any], path: str, store: Store) -> Any:
    for key in value:
        if type(key) is not str or key[:1] == "$":
            break
    else:
        return {key: encode(item, f"{path}/{key}", store) for key, item in value.items()}
    return {
        "$dict": [
            [encode(key, path, store), encode(item, f"{path}/{key}", store)]
            for key, item in value.items()
        ]
    }


def _encode_numpy(value: Any, path: str, store: Store) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$ndarray": store(path, torch.from_numpy(value.copy()))}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$number": [value.dtype.str, encode(value.item(), path, store)]}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved.",
        hint="Return only tensors, numbers, strings, lists, tuples, sets and dicts from "
        "state_dict().",
    )


def decode(value: Any, fetch: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the tree that was encoded; `fetch` returns the tensor for a reference, if there are
    any.

    Raises CheckpointError if it is no such tree.
    """
    try:
        return _decode(value, fetch)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        RuntimeError,
    ) as error:
        problem = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise CheckpointError(
            f"The checkpoint holds a state that can't be decoded: {problem}."
        ) from error


def _decode(value: Any, fetch: Any) -> Any:
    if type(value) is list:
        return [_decode(item, fetch) for item in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, fetch) for key, item in value.items()}
    if tag == "$inline":
        return _fetch_inline(value)
    if tag in ("$tensor", "$sharded"):
        return fetch(value)
    body = value[tag]
    return DECODERS[tag](body, lambda item: _decode(item, fetch))


def canonical_json(tree: Any) -> str:
    """Return a tree as text that doesn't depend on the order of its sets and dicts, which may
    differ between ranks.
    """
    return json.dumps(_sort_unordered(tree), sort_keys=True)


def _sort_unordered(value: Any) -> Any:
    if type(value) is list:
        return [_sort_unordered(item) for item in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if tag in ("$set", "$dict", "$counter"):
        return {tag: sorted(canonical_json(item) for item in value[tag])}
    return {key: _sort_unordered(item) for key, item in value.items()}


def tensor_references(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the references to tensors, in the order of the tree."""
    if type(value) is list:
        for item in value:
            yield from tensor_references(item)
    elif type(value) is dict:
        if "$tensor" in value or "$sharded" in value:
            yield value
        else:
            yield from tensor_references(list(value.values()))


def _decode_number(body: Any, _: Callable[[Any], Any]) -> Any:
    import numpy

    return numpy.dtype(body[0]).type(
        body[1] if type(body[1]) is not dict else complex(*body[1]["$complex"])
    )


def _to_base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


# type -> its tag, and what makes JSON of a value
ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    torch.Size: ("$size", list),
    bytes: ("$bytes", _to_base64),
    bytearray: ("$bytes", _to_base64),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}
DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$dict": lambda body, inner: {inner(key): inner(item) for key, item in body},
    "$tuple": lambda body, inner: tuple(inner(item) for item in body),
    "$set": lambda body, inner: {inner(item) for item in body},
    "$counter": lambda body, inner: collections.Counter({inner(key): count for key, count in body}),
    "$lazy": lambda body, _: (
        UninitializedParameter if body == "parameter" else UninitializedBuffer
    )(),
    "$size": lambda body, _: torch.Size(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$complex": lambda body, _: complex(*body),
    "$dtype": lambda body, _: getattr(torch, body),
    "$device": lambda body, _: torch.device(body),
    "$ndarray": lambda body, inner: inner(body).numpy(),
    "$number": _decode_number,
}


def store_inline(path: str, value: torch.Tensor) -> dict[str, Any]:
    """Encode a tensor in the JSON itself: for small tensors of one rank, such as a generator's
    state.
    """
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "$inline": _to_base64(ctypes.string_at(flat.data_ptr(), flat.numel())),
        "dtype": DTYPE_NAMES[value.dtype],
        "shape": list(value.shape),
    }


def _fetch_inline(entry: dict[str, Any]) -> torch.Tensor:
    """Return a tensor that `store_inline` encoded."""
    raw = bytearray(base64.b64decode(entry["$inline"]))
    dtype = TORCH_DTYPES[entry["dtype"]]
    if not raw:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(entry["shape"])


# -- state that differs between ranks


def digest_state(tree: Any, tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of plain values and of evenly spaced elements of the tensors."""
    tensors = list(tensors)
    per_tensor = max(MIN_SAMPLE, MAX_SAMPLE // max(1, len(tensors)))
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        samples.setdefault((tensor.device, tensor.dtype), []).append(
            flat[:: max(1, len(flat) // per_tensor)]
        )
    # an int64, also when negated
    digest = hashlib.blake2b(canonical_json(tree).encode(), digest_size=7)
    digest.update(str([tensor.shape for tensor in tensors]).encode())
    for parts in samples.values():
        raw = torch.cat(parts).view(torch.uint8).cpu()
        digest.update(ctypes.string_at(raw.data_ptr(), raw.numel()))
    return int.from_bytes(digest.digest(), "little")


def find_differing(digests: Mapping[str, int], group: Any) -> set[str]:
    """Return the names whose digests are not the same on all ranks. A collective; all ranks pass
    the same names.
    """
    values = torch.tensor(list(digests.values()), dtype=torch.int64)
    highest = torch.cat([values, -values])
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    top, bottom = highest.chunk(2)
    return {name for name, same in zip(digests, (top == -bottom).tolist(), strict=True) if not same}
