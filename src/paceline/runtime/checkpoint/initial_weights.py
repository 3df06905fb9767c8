"""Start a new run with weights from another run or a file. Everything else starts fresh:
optimizer, schedule, step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import COUNTER, find_weight_files, plain_names
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import restore
from paceline.runtime.checkpoint.reader import (
    CheckpointReader,
    RankGroup,
    find_start,
    open_share,
    read_into,
)
from paceline.runtime.checkpoint.safetensors import TORCH_DTYPES, read_header
from paceline.runtime.checkpoint.sharded import shard_like
from paceline.runtime.checkpoint.state_tree import METADATA_KEY

# of the weights among other objects
USUAL_NAMES = ("model", "state_dict", "model_state_dict", "module", "net")


@dataclass(frozen=True)
class Weights:
    """The weights of one module in the source."""

    shapes: Mapping[str, Sequence[int]]  # of each key's tensor; empty for other values
    metadata: Mapping[str, Any]
    read: Callable[[str, Any], Any]  # takes a key, and the tensor that it will be loaded into

    def keys(self) -> dict[str, str]:
        """Map names without the prefixes that wrappers add to the keys."""
        return {name: key for key, name in plain_names(list(self.shapes)).items()}

    def fit(self, wanted: Mapping[str, Any]) -> bool:
        """Return whether all of a module's names are here, with the same shapes."""
        own = self.keys()
        return all(
            name in own and list(self.shapes[own[name]]) == list(getattr(each, "shape", ()))
            for name, each in wanted.items()
        )


def load_weights(
    source: Path,
    objects: Mapping[str, Any],
    *,
    strict: bool,
    ranks: RankGroup,
    warn: Callable[[str], None],
) -> Path:
    """Load the weights of the modules among these objects, and return where they are from; `warn`
    is rank 0's.
    """
    modules = {name: each for name, each in objects.items() if isinstance(each, torch.nn.Module)}
    if not modules:
        raise CheckpointError(
            f"run.resume got no model to load {source} into.",
            hint="Pass it by name: run.resume(model=model, ...).",
        )
    with ExitStack() as stack:
        if files := find_weight_files(source):
            states = [state for file in files for state in _read_file(file).values()]
            merged = {key: each for state in states for key, each in state.items()}
            found, source_path = {source.name: _weights_of(merged)}, source
        elif source.is_file():
            found = {key: _weights_of(each) for key, each in _read_file(source).items()}
            source_path = source
        else:
            source_path = find_start(source, ranks, warn=warn)
            reader = stack.enter_context(CheckpointReader(source_path))
            trees = reader.objects()
            metadata = trees.get(METADATA_KEY, {})
            found = {
                name: _weights_in(reader, trees[name], metadata.get(name, {}))
                for name, kind in reader.marker.objects.items()
                if kind == "module"
            }
        chosen = {
            name: _choose(name, each, found, alone=len(modules) == 1)
            for name, each in modules.items()
        }
        loaded = {name: weights for name, weights in chosen.items() if weights is not None}
        if not loaded:
            raise CheckpointError(
                f"{source_path} has weights for {restore.listed(list(found))}, but not for "
                f"{restore.listed(list(modules))}.",
                hint="Start from a run of the same model.",
            )
        for name, weights in loaded.items():
            _load(name, modules[name], weights, source_path, strict=strict, warn=warn)
    warn(
        f"started with the weights of {restore.listed(list(loaded))} from {source_path}; "
        "everything else starts fresh"
    )
    if missing := [name for name in modules if name not in loaded]:
        warn(f"no weights for {restore.listed(missing)} there: keeping the initial values")
    return source_path


def _load(
    name: str,
    module: torch.nn.Module,
    weights: Weights,
    source_path: Path,
    *,
    strict: bool,
    warn: Callable[[str], None],
) -> None:
    current = module.state_dict()
    own = weights.keys()
    names = plain_names(list(current))
    keys = {key: own[plain] for key, plain in names.items() if plain in own}
    tied = {key: id(each) for key, each in module.named_parameters(remove_duplicate=False)}
    for key in names.keys() - keys.keys():  # files of safetensors have one name of a parameter
        others = [other for other in keys if key in tied and tied.get(other) == tied[key]]
        if others:
            keys[key] = keys[others[0]]
    rest = [key for plain, key in own.items() if plain not in names.values()]
    keys |= {key: key for key in rest}
    state = {key: weights.read(saved, current.get(key)) for key, saved in keys.items()}
    counter = state.pop(COUNTER, current.get(COUNTER))
    if COUNTER in current:
        state[COUNTER] = counter
    try:
        restore.load_module(
            name, module, state, current, metadata=weights.metadata, strict=strict, warn=warn
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"Cannot start from {source_path}. {error.message}",
            hint="Start from weights of the same model, or load only those that fit: --no-strict.",
        ) from None  # its hint is for run.resume


def _choose(
    name: str, module: torch.nn.Module, found: Mapping[str, Weights], *, alone: bool
) -> Weights | None:
    """Return the weights for a module: those of its name, or the only ones that have its keys."""
    if name in found:
        return found[name]
    if alone and len(found) == 1:
        return next(iter(found.values()))
    current = module.state_dict()
    names = plain_names(list(current))
    wanted = {plain: current[key] for key, plain in names.items() if plain != COUNTER}
    fitting = {key: weights for key, weights in found.items() if wanted and weights.fit(wanted)}
    if len(fitting) > 1 or (alone and not fitting):  # the usual names come first
        usual = [key for key in USUAL_NAMES if key in (fitting or found)]
        return found[usual[0]] if usual else None
    return next(iter(fitting.values()), None)


def _weights_of(state: Mapping[str, Any]) -> Weights:
    """Return what a file has; torch keeps the versions of modules with a state."""
    found = getattr(state, "_metadata", None)
    shapes = {key: getattr(each, "shape", ()) for key, each in state.items()}

    def read(key: str, current: Any) -> Any:
        return shard_like(state[key], current)

    return Weights(shapes, found if isinstance(found, dict) else {}, read)


def _weights_in(reader: CheckpointReader, tree: Mapping[str, Any], metadata: Any) -> Weights:
    """Return what a checkpoint has of a module."""

    def read(key: str, current: Any) -> Any:
        return reader.read(tree[key], lambda _: current)

    return Weights({key: reader.shape(each) for key, each in tree.items()}, metadata, read)


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    """Return the states in a file, by the name of the object, if the file has several."""
    if path.suffix == ".safetensors":
        return {path.name: _read_safetensors(path)}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch trusts the file: a damaged one makes it fail in any way
        # The first line only: torch's advice is to trust the file, which would run code from it.
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"Cannot load the weights in {path}: {type(error).__name__}: {reason}",
            hint="It must be complete and contain only tensors and plain values, as "
            "torch.save(model.state_dict(), ...) writes them.",
        ) from error
    if _is_state(content):
        return {path.name: content}
    nested = (
        {str(key): each for key, each in content.items() if _is_state(each)}
        if isinstance(content, dict)
        else {}
    )
    if not nested:
        raise CheckpointError(f"{path} holds no weights.", hint="Save model.state_dict() there.")
    return nested


def _is_state(value: Any) -> bool:
    """Return whether this is the state of a module: names with tensors."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    return bool(value) and sum(isinstance(each, torch.Tensor) for each in value.values()) * 2 > len(
        value
    )


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with open_share(path) as file:
        pieces, begin = read_header(file, name=path.name, size=os.fstat(file.fileno()).st_size)
        for piece in pieces:
            if not piece.is_whole:
                raise CheckpointError(
                    f"{path} is a part of a checkpoint.",
                    hint=f"Start from the whole checkpoint: {path.parent}",
                )
            tensors[piece.name] = torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtype])
            read_into(file, begin + piece.offset, tensors[piece.name].view(-1))
    return tensors
