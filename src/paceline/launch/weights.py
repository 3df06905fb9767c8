"""Export weights from a checkpoint, byte by byte and without torch, which a login node may not
have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import safetensors
from paceline.contract.checkpoint import OBJECTS_FILE, Marker, is_share
from paceline.contract.safetensors import LENGTH
from paceline.errors import CheckpointError, UsageError

CHUNK = 8 << 20


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a tensor in one file."""

    path: Path
    offset: int
    nbytes: int
    start: int  # first element


@dataclass
class StoredTensor:
    """A tensor in the checkpoint, and the byte ranges that hold it, in order."""

    dtype: str
    shape: list[int]
    ranges: list[ByteRange]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.ranges)


def choose_object(marker: Marker, name: str | None) -> str:
    """Return the object to export: the requested one, `model`, or the only module."""
    modules = [module for module, kind in marker.objects.items() if kind == "module"]
    if name is not None:
        if marker.objects.get(name) == "rank":
            raise UsageError(
                f"{name!r} has separate state on each rank, so it cannot be exported to one file.",
                hint=f"Choose one of {', '.join(modules) or 'none'}.",
            )
        if name in marker.objects:
            return name
        raise UsageError(
            f"The checkpoint has no object {name!r}.",
            hint=f"Use one of {', '.join(marker.objects)}.",
        )
    if "model" in modules:
        return "model"
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"The checkpoint has {len(modules)} modules: {', '.join(modules) or 'none'}.",
        hint="Choose one with --object NAME.",
    )


def plain_names(keys: list[str]) -> dict[str, str]:
    """Map each state key to its name without the prefixes that wrappers add."""
    plain = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    weights = [name for name in plain.values() if name != "n_averaged"]
    while weights and all(name.startswith("module.") for name in weights):
        plain = {key: name.removeprefix("module.") for key, name in plain.items()}
        weights = [name for name in plain.values() if name != "n_averaged"]
    return plain


def tensor_references(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Return an object's state keys that are tensors, with the references to them."""
    try:
        tree = json.loads((folder / OBJECTS_FILE).read_bytes())[name]
        if not isinstance(tree, dict):
            raise ValueError("the state is not a dict")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{OBJECTS_FILE} of {folder.name} can't be read: {error}.") from None
    return {
        key: value
        for key, value in tree.items()
        if isinstance(value, dict) and ("$tensor" in value or "$sharded" in value)
    }


def read_index(folder: Path, marker: Marker) -> dict[str, StoredTensor]:
    """Return every tensor of all shares with its byte ranges."""
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(filter(is_share, marker.files)):
        with open(folder / name, "rb") as file:
            pieces, begin = safetensors.read_header(
                file, name=name, size=os.fstat(file.fileno()).st_size
            )
        for piece in pieces:
            tensor = tensors.setdefault(
                piece.name, StoredTensor(piece.dtype, list(piece.shape), [])
            )
            tensor.ranges.append(
                ByteRange(folder / name, begin + piece.offset, piece.nbytes, piece.start)
            )
    for tensor in tensors.values():
        tensor.ranges.sort(key=lambda part: part.start)
    return tensors


def write_weights(
    output: Path, tensors: dict[str, StoredTensor], *, metadata: dict[str, str]
) -> int:
    """Write one safetensors file, complete or absent, and return its size in bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        table[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chunks = (chunk for tensor in tensors.values() for chunk in _read_chunks(tensor))
    safetensors.write_file(output, LENGTH.pack(len(text)) + text, chunks)
    return LENGTH.size + len(text) + offset


def _read_chunks(tensor: StoredTensor) -> Iterator[bytes]:
    for part in tensor.ranges:
        with open(part.path, "rb") as file:
            file.seek(part.offset)
            left = part.nbytes
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{part.path.name} ends before its last tensor does.")
                left -= len(chunk)
                yield chunk
