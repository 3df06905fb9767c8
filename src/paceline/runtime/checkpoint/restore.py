"""Load a checkpoint into the objects of this run, whatever number of ranks wrote it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.errors import CheckpointError
from paceline.runtime import randomness
from paceline.runtime.checkpoint import state_tree
from paceline.runtime.checkpoint.reader import CheckpointReader
from paceline.runtime.checkpoint.state_tree import METADATA_KEY
from paceline.runtime.randomness import seed_rank

MAX_KEYS_SHOWN = 3  # in an error
LAZY = (UninitializedParameter, UninitializedBuffer)
CHANGED = (
    "Resume with the objects that were saved, or keep the current state of those that do not fit: "
    "run.resume(..., strict=False)."
)


@dataclass(frozen=True)
class Options:
    """How a checkpoint is loaded."""

    per_rank: Collection[str]  # objects declared to have a state of their own on each rank
    rank: int
    world_size: int
    tensor: int  # ranks that share their samples, each with a part of every layer
    seed: int
    warn: Callable[[str], None]  # called on rank 0 only
    strict: bool = True  # whether everything must fit
    own: bool = True  # whether this run wrote the checkpoint


def load(reader: CheckpointReader, objects: Mapping[str, Any], options: Options) -> None:
    """Load the checkpoint's state into the objects and the random generators."""
    rank, world_size, tensor = options.rank, options.world_size, options.tensor
    kinds = reader.marker.objects
    objects = _choose_objects(reader, objects, options)
    trees = reader.objects()
    states = _read_rank_states(reader, rank=rank, world_size=world_size, tensor=tensor)
    # The saved rank that worked on the samples that this one continues with.
    data_rank = rank if tensor == reader.marker.tensor else rank // tensor * reader.marker.tensor
    for name, thing in objects.items():
        with _forgive(name, thing, options):
            if kinds[name] == "rank":
                _load_rank_state(name, thing, states, reader, data_rank=data_rank, options=options)
            else:
                metadata = trees.get(METADATA_KEY, {}).get(name, {})
                _load_object(name, thing, trees[name], reader, metadata=metadata, options=options)
    if reader.marker.world_size // reader.marker.tensor != world_size // tensor:
        seed_rank(seed=options.seed, step=reader.marker.step, rank=rank // tensor)
    else:
        with _explain_errors("the random generators"):
            randomness.restore(state_tree.decode(states[data_rank]["rng"]))


def _choose_objects(
    reader: CheckpointReader, objects: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """Return the objects that the checkpoint has a state for.

    New ones keep their state, and saved ones that are gone are left out; rank 0 says so. It is an
    error if a new one may be one that is gone, under another name.
    """
    kinds = reader.marker.objects
    new = [name for name in objects if name not in kinds]
    gone = [name for name in kinds if name not in objects]
    renamed = {_group_of(state_tree.kind_of(objects[name])) for name in new} & {
        _group_of(kinds[name]) for name in gone
    }
    if renamed and options.strict:
        raise CheckpointError(
            f"{reader.folder.name} has state for {listed(gone)}, but not for {listed(new)}.",
            hint="Resume objects under the names they were saved with. If the objects really "
            "differ, use "
            "run.resume(..., strict=False): new ones then keep their current state.",
        )
    if new:
        options.warn(f"not loaded: {listed(new)} ({reader.folder.name} has no state of that name)")
    if gone:
        options.warn(
            f"not resumed: {listed(gone)} ({reader.folder.name} has a state that run.resume does "
            "not ask for)"
        )
    return {name: thing for name, thing in objects.items() if name in kinds}


def _group_of(kind: str) -> str:
    """State without tensors has the kind of state that each rank has for itself."""
    return "state" if kind == "rank" else kind


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_KEYS_SHOWN} more" if len(names) > MAX_KEYS_SHOWN else ""
    return ", ".join(map(repr, names[:MAX_KEYS_SHOWN])) + more


@contextmanager
def _forgive(name: str, thing: Any, options: Options) -> Iterator[None]:
    """Without `strict`, let an object that can't be loaded start as it is; in a new run, a loader
    always.
    """
    try:
        yield
    except CheckpointError as error:
        if options.strict and (options.own or not state_tree.is_loader(thing)):
            raise
        options.warn(f"not loaded: {name!r} ({error.message.rstrip('.')})")


def _read_rank_states(
    reader: CheckpointReader, *, rank: int, world_size: int, tensor: int
) -> dict[int, Any]:
    """Return the saved states by rank: this rank's own if the ranks divide the data as before,
    otherwise all.
    """
    saved = reader.marker.world_size
    ranks = [rank] if (saved, reader.marker.tensor) == (world_size, tensor) else range(saved)
    return {number: reader.rank_state(number) for number in ranks}


def _load_rank_state(
    name: str,
    thing: Any,
    states: Mapping[int, Any],
    reader: CheckpointReader,
    *,
    data_rank: int,
    options: Options,
) -> None:
    def decode(number: int) -> Any:
        def fetch(reference: dict[str, Any]) -> torch.Tensor:
            return reader.tensor(state_tree.own_name(reference["$tensor"], number))

        return state_tree.decode(states[number]["objects"][name], fetch)

    is_rescaled = options.world_size != reader.marker.world_size
    with _explain_errors(name):
        if is_rescaled and hasattr(thing, "load_rank_states"):
            thing.load_rank_states([decode(number) for number in sorted(states)])
            return
        number = options.rank
        if state_tree.is_loader(thing):
            number = data_rank if data_rank in states else 0
        elif is_rescaled:
            number = _choose_rank(name, states, options)
        thing.load_state_dict(decode(number))


def _choose_rank(name: str, states: Mapping[int, Any], options: Options) -> int:
    """Return the saved rank whose state of an object this one gets, now that there are more or
    fewer ranks: rank 0, with a warning if others had another state.

    Raises an error if the object was declared to have a state per rank.
    """
    if name in options.per_rank:
        raise CheckpointError(
            f"{name!r} has separate state on each of {len(states)} ranks and cannot resume on "
            f"{options.world_size}.",
            hint=f"Resume on {len(states)} ranks, or add a method load_rank_states(states) to it: "
            "it is called on each rank with the states of all saved ranks.",
        )
    first, *others = [states[number]["objects"][name] for number in sorted(states)]
    if first and others and not any(others):  # such as a history that only rank 0 keeps
        return min(options.rank, 1)
    # Only an object that had a state per rank refers to tensors here; small ones are in the tree
    # itself.
    differ = len({state_tree.canonical_json(tree) for tree in (first, *others)}) > 1
    if differ or any(state_tree.tensor_references([first, *others])):
        options.warn(
            f"the state of {name!r} differed between {len(states)} ranks; now there are "
            f"{options.world_size}, and all get that of rank 0, unless you add a method "
            "load_rank_states(states) to it"
        )
    return 0


def _load_object(
    name: str,
    thing: Any,
    tree: Any,
    reader: CheckpointReader,
    *,
    metadata: Mapping[str, Any],
    options: Options,
) -> None:
    current = thing.state_dict()
    state = reader.read(tree, _find_counterparts(name, thing, current))
    if isinstance(thing, torch.nn.Module):
        load_module(
            name, thing, state, current, metadata=metadata, strict=options.strict, warn=options.warn
        )
        return
    if not options.strict and hasattr(thing, "param_groups") and isinstance(state, dict):
        _drop_misshapen(name, thing, state, options)
    with _explain_errors(name):
        thing.load_state_dict(state)


def _find_counterparts(name: str, thing: Any, current: Any) -> Callable[[str], Any]:
    """Return a function that returns the current tensor for a saved one, or for optimizer state its
    parameter.
    """
    tensors: dict[str, torch.Tensor] = {}

    def store(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        tensors[path] = tensor
        return {}

    state_tree.encode(current, name, store)
    parameters = [each for group in getattr(thing, "param_groups", ()) for each in group["params"]]
    by_number = {str(number): each.detach() for number, each in enumerate(parameters)}

    def find(key: str) -> torch.Tensor | None:
        match = re.fullmatch(r"[^/]+/state/(\d+)/[^/]+", key)
        return tensors.get(key, by_number.get(match[1]) if match else None)

    return find


def load_module(
    name: str,
    module: torch.nn.Module,
    state: Any,
    current: Any,
    *,
    metadata: Mapping[str, Any],
    strict: bool,
    warn: Callable[[str], None],
) -> None:
    """Load a module's state. Without `strict`, load what fits, and warn about the rest."""
    state = OrderedDict(state)
    # The versions by which modules recognize the state of an older class.
    state._metadata = {key: metadata.get(key, {"version": 1}) for key, _ in module.named_modules()}
    misshapen = [
        key for key in state if key in current and not _same_shape(state[key], current[key])
    ]
    if not strict:
        for key in misshapen:
            del state[key]
    with _explain_errors(name):
        found = module.load_state_dict(state, strict=strict)
    if strict or found is None:
        return
    missing = [key for key in found.missing_keys if key not in misshapen]
    problems = [
        f"{what}: {listed(keys)}"
        for what, keys in (
            ("wrong shape", misshapen),
            ("missing in the checkpoint", missing),
            ("unexpected in the checkpoint", found.unexpected_keys),
        )
        if keys
    ]
    if problems:
        warn(f"{name!r} is loaded only partially; {'; '.join(problems)}")


def _drop_misshapen(name: str, optimizer: Any, state: dict[str, Any], options: Options) -> None:
    """Drop the state of parameters that have another shape now, such as those of a new head."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states, groups = state.get("state", {}), state.get("param_groups", [])
    if sum(len(group["params"]) for group in groups) != len(parameters):
        return  # nothing of it fits
    dropped = [
        key
        for key, values in states.items()
        if isinstance(key, int)
        and key < len(parameters)
        and isinstance(values, dict)
        and any(
            isinstance(each, torch.Tensor) and each.dim() and each.shape != parameters[key].shape
            for each in values.values()
        )
    ]
    for key in dropped:
        del states[key]
    if dropped:
        options.warn(
            f"{name!r} is loaded only partially; {len(dropped)} of {len(parameters)} parameters "
            "have a different shape"
        )


def _same_shape(saved: Any, current: Any) -> bool:
    """Return whether a saved tensor fits. One that is not initialized yet takes any shape."""
    if not isinstance(saved, torch.Tensor) or not isinstance(current, torch.Tensor):
        return True
    return isinstance(current, LAZY) or isinstance(saved, LAZY) or saved.shape == current.shape


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Add the object's name to errors of its load_state_dict."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"The checkpoint doesn't fit {name!r}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}.",
            hint=CHANGED,
        ) from error
