"""Start a new run with weights from another run or a file. Everything else starts fresh:
optimizer, schedule, step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import find_weight_files, is_weights_file
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import restore, sharded, state_tree
from paceline.runtime.checkpoint.reader import (
    CheckpointReader,
    RankGroup,
    find_start,
    open_share,
    read_into,
)
from paceline.runtime.checkpoint.safetensors import read_header
from paceline.runtime.checkpoint.state_tree import METADATA_KEY, TORCH_DTYPES

# of the weights among other objects
USUAL_NAMES = ("model", "state_dict", "model_state_dict", "module", "net")
COUNTER = "n_averaged"  # of torch's AveragedModel, which has the model's own weights besides it


@dataclass(frozen=True)
class Weights:
    """The weights of one module in the source: each key with its tensor, or a reference to it."""

    entries: Mapping[str, Any]
    metadata: Mapping[str, Any]
    reader: CheckpointReader | None = None  # None for a file, whose tensors are there

    def keys(self) -> dict[str, str]:
        """Map names without the prefixes that wrappers add to the keys."""
        return {name: key for key, name in _plain_names(list(self.entries)).items()}

    def fit(self, wanted: Mapping[str, Any]) -> bool:
        """Return whether all of a module's names are here, with the same shapes."""
        own = self.keys()
        return all(
            name in own
            and (not isinstance(each, torch.Tensor) or self._shape(own[name]) == list(each.shape))
            for name, each in wanted.items()
        )

    def _shape(self, key: str) -> list[int]:
        entry = self.entries[key]
        if isinstance(entry, torch.Tensor) or self.reader is None:
            return list(getattr(entry, "shape", ()))
        return list(entry.get("shape") or self.reader.shape(entry.get("$tensor", "")))

    def load(self, keys: Mapping[str, str], current: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for a module that has `current` now; `keys` maps its keys to those
        here.
        """
        state = {key: self.entries[own] for key, own in keys.items()}
        if self.reader is None:
            return {
                key: restore.shard_like(tensor, current.get(key)) for key, tensor in state.items()
            }
        targets: dict[str, Any] = {}
        for key, entry in state.items():
            for reference in state_tree.tensor_references(entry):
                if "$sharded" in reference:
                    targets[reference["$sharded"]] = _target(reference, current.get(key))
        wanted = {name: target for name, target in targets.items() if target.device.type != "meta"}
        if wanted:
            sharded.read(self.reader.folder, wanted)

        def decode(key: str, entry: Any) -> Any:
            def fetch(reference: dict[str, Any]) -> Any:
                if "$sharded" in reference:
                    return targets[reference["$sharded"]]
                assert self.reader is not None
                return restore.shard_like(
                    self.reader.tensor(reference["$tensor"]), current.get(key)
                )

            return state_tree.decode(entry, fetch)

        return {key: decode(key, entry) for key, entry in state.items()}


def _target(reference: Mapping[str, Any], current: Any) -> torch.Tensor:
    """Return what a sharded tensor is read into; one on the meta device if it has another shape."""
    if isinstance(current, torch.Tensor) and list(current.shape) != list(reference["shape"]):
        return torch.empty(reference["shape"], device="meta")
    return sharded.make_target(reference, current)


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
            found, source_path = _read_files(files), source
        elif source.is_file():
            found, source_path = _read_file(source), source
        else:
            source_path = find_start(source, ranks, warn=warn)
            found = _read_checkpoint(stack.enter_context(CheckpointReader(source_path)))
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
    names = _plain_names(list(current))
    keys = {key: own[plain] for key, plain in names.items() if plain in own}
    for key, other in _tied(module, names).items():
        if key not in keys and other in keys:  # files of safetensors have only one of them
            keys[key] = keys[other]
    rest = [key for plain, key in own.items() if plain not in names.values()]
    state = weights.load({**keys, **{key: key for key in rest}}, current)
    if COUNTER in current and COUNTER not in weights.entries:
        state[COUNTER] = current[COUNTER]
    if COUNTER not in current:
        state.pop(COUNTER, None)
    try:
        restore.load_module(
            name, module, state, current, metadata=weights.metadata, strict=strict, warn=warn
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"Cannot start from {source_path}. {error.message}",
            hint="Start from weights of the same model, or load only those that fit: --no-strict.",
        ) from None  # its hint is for run.resume


def _tied(module: torch.nn.Module, keys: Collection[str]) -> dict[str, str]:
    """Map each key of a parameter that has several to another key of it."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in keys:
            found.setdefault(id(parameter), []).append(name)
    return {
        name: other
        for names in found.values()
        for name in names
        for other in names
        if other != name
    }


def _choose(
    name: str, module: torch.nn.Module, found: Mapping[str, Weights], *, alone: bool
) -> Weights | None:
    """Return the weights for a module: those of its name, or the only ones that have its keys."""
    if name in found:
        return found[name]
    if alone and len(found) == 1:
        return next(iter(found.values()))
    current = module.state_dict()
    names = _plain_names(list(current))
    wanted = {plain: current[key] for key, plain in names.items() if plain != COUNTER}
    fitting = {key: weights for key, weights in found.items() if wanted and weights.fit(wanted)}
    if len(fitting) > 1 or (alone and not fitting):  # the usual names come first
        usual = [key for key in USUAL_NAMES if key in (fitting or found)]
        return found[usual[0]] if usual else None
    return next(iter(fitting.values()), None)


def _plain_names(keys: list[str]) -> dict[str, str]:
    """Map each key to its name without the prefixes that compiled, averaged and wrapped models
    add.
    """
    plain = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    weights = [name for name in plain.values() if name != COUNTER]
    while weights and all(name.startswith("module.") for name in weights):
        plain = {key: name.removeprefix("module.") for key, name in plain.items()}
        weights = [name for name in plain.values() if name != COUNTER]
    return plain


def _read_checkpoint(reader: CheckpointReader) -> dict[str, Weights]:
    trees = reader.objects()
    metadata = trees.get(METADATA_KEY, {})
    return {
        name: Weights(trees[name], metadata.get(name, {}), reader)
        for name, kind in reader.marker.objects.items()
        if kind == "module"
    }


def _read_files(paths: Sequence[Path]) -> dict[str, Weights]:
    """Return the weights of one model that several files have together."""
    entries: dict[str, Any] = {}
    for path in paths:
        for weights in _read_file(path).values():
            entries |= weights.entries
    return {paths[0].parent.name: Weights(entries, {})}


def _read_file(path: Path) -> dict[str, Weights]:
    """Return the weights in a file, by the name of the object, if the file has several."""
    if not is_weights_file(path.name):
        raise CheckpointError(
            f"{path} is not a weights file.", hint="Use a .safetensors, .pt, .pth or .bin file."
        )
    if path.suffix == ".safetensors":
        return {path.name: Weights(_read_safetensors(path), {})}
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
        return {path.name: Weights(content, _metadata(content))}
    nested = (
        {str(key): each for key, each in content.items() if _is_state(each)}
        if isinstance(content, dict)
        else {}
    )
    if not nested:
        raise CheckpointError(f"{path} holds no weights.", hint="Save model.state_dict() there.")
    return {name: Weights(each, _metadata(each)) for name, each in nested.items()}


def _metadata(state: Any) -> Mapping[str, Any]:
    """Return the versions of modules that torch keeps with a state."""
    found = getattr(state, "_metadata", None)
    return found if isinstance(found, dict) else {}


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
