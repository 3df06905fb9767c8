"""Weights out of a checkpoint, byte by byte and without torch: a login node may have none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import safetensors
from paceline.contract.checkpoint.marker import Marker
from paceline.contract.checkpoint.safetensors import LENGTH
from paceline.errors import CheckpointError, UsageError

CHUNK = 8 << 20


@dataclass(frozen=True)
class Part:
    """Where some bytes of a tensor lie."""

    path: Path
    offset: int
    nbytes: int
    start: int  # first element


@dataclass
class Found:
    dtype: str
    shape: list[int]
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def choose_object(marker: Marker, name: str | None) -> str:
    """The module whose weights are meant: the one asked for, `model`, or the only one."""
    modules = [each for each, kind in marker.objects.items() if kind == "module"]
    if name is not None:
        if name in marker.objects:
            return name
        raise UsageError(f"the checkpoint has no {name!r}", hint=f"it has {', '.join(marker.objects)}")
    if "model" in modules:
        return "model"
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"the checkpoint has {len(modules)} modules: {', '.join(modules) or 'none'}",
        hint="choose one with --object NAME",
    )


def plain_names(keys: list[str]) -> dict[str, str]:
    """Each key and what it is called without the prefixes that wrappers add."""
    bare = {key: ".".join(word for word in key.split(".") if word != "_orig_mod") for key in keys}
    weights = [name for name in bare.values() if name != "n_averaged"]
    while weights and all(name.startswith("module.") for name in weights):
        bare = {key: name.removeprefix("module.") for key, name in bare.items()}
        weights = [name for name in bare.values() if name != "n_averaged"]
    return bare


def references(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """The state keys of an object that are tensors, and what stands for each of them in the tree."""
    tree = json.loads((folder / "objects.json").read_text(encoding="utf-8"))[name]
    return {
        key: value for key, value in tree.items()
        if isinstance(value, dict) and ("$tensor" in value or "$sharded" in value)
    }  # fmt: skip


def read_tables(folder: Path, marker: Marker) -> dict[str, Found]:
    """Every tensor of the shares, with the places of its parts."""
    tensors: dict[str, Found] = {}
    for name in sorted(each for each in marker.files if each.endswith(".safetensors")):
        with open(folder / name, "rb") as file:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            file.seek(0)
            pieces, begin = safetensors.parse(file.read(LENGTH.size + length), where=name)
        for piece in pieces:
            found = tensors.setdefault(piece.name, Found(piece.dtype, list(piece.shape), []))
            found.parts.append(Part(folder / name, begin + piece.offset, piece.nbytes, piece.start))
    for found in tensors.values():
        found.parts.sort(key=lambda part: part.start)
    return tensors


def write(output: Path, tensors: dict[str, Found], *, metadata: dict[str, str]) -> int:
    """One safetensors file, whole or absent; the number of its bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, found in tensors.items():
        table[name] = {
            "dtype": found.dtype,
            "shape": found.shape,
            "data_offsets": [offset, offset + found.nbytes],
        }
        offset += found.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(LENGTH.pack(len(text)) + text)
            for found in tensors.values():
                for chunk in _chunks(found):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return LENGTH.size + len(text) + offset


def _chunks(found: Found) -> Iterator[bytes]:
    for part in found.parts:
        with open(part.path, "rb") as file:
            file.seek(part.offset)
            left = part.nbytes
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{part.path.name} ends before its last tensor does")
                left -= len(chunk)
                yield chunk
