"""Read a complete checkpoint: tensors by name, assembled from the shares that hold their pieces."""

from __future__ import annotations

import ctypes
import json
import math
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.contract.checkpoint import OBJECTS_FILE, Marker, is_share, read_marker, state_file
from paceline.contract.files import open_without_waiting
from paceline.contract.safetensors import Piece, read_header
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import state_tree
from paceline.runtime.checkpoint.state_tree import METADATA_KEY, TORCH_DTYPES


class CheckpointReader:
    """Reads every byte once, directly into its tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = read_marker(folder)
        self._files: list[FileIO] = []
        self._pieces: dict[str, list[tuple[FileIO, int, Piece]]] = {}

    def __enter__(self) -> CheckpointReader:
        for name in sorted(self.marker.files):
            if is_share(name):
                self._open_share(self.folder / name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def _open_share(self, path: Path) -> None:
        file = open_share(path)
        self._files.append(file)
        pieces, begin = read_header(file, name=path.name, size=os.fstat(file.fileno()).st_size)
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append((file, begin + piece.offset, piece))

    def objects(self) -> dict[str, Any]:
        """Return the trees of the objects that all ranks share. Each can be decoded."""
        return read_objects(self.folder, self.marker)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return the state of a saved rank, with the trees of its own objects. Each can be
        decoded.
        """
        return read_rank_state(self.folder, self.marker, state_file(rank, self.marker.world_size))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; empty if there is no such tensor."""
        parts = self._pieces.get(name)
        return parts[0][2].shape if parts else ()

    def tensor(self, name: str) -> torch.Tensor:
        parts = self._pieces.get(name)
        if not parts:
            raise CheckpointError(f"{self.folder.name} has no tensor {name}.")
        first = parts[0][2]
        ends = [0, *(piece.stop for _, _, piece in sorted(parts, key=lambda part: part[2].start))]
        if [*sorted(piece.start for _, _, piece in parts), math.prod(first.shape)] != ends:
            raise CheckpointError(f"{self.folder.name} holds only a part of {name}.")
        tensor = torch.empty(first.shape, dtype=TORCH_DTYPES[first.dtype])
        flat = tensor.view(-1)
        for file, offset, piece in parts:
            if (piece.shape, piece.dtype) != (
                first.shape,
                first.dtype,
            ) or not 0 <= piece.start <= piece.stop:
                raise CheckpointError(
                    f"{file.name} holds a part of {name} that doesn't fit the others."
                )
            read_into(file, offset, flat[piece.start : piece.stop])
        return tensor


def open_share(path: Path) -> FileIO:
    """Open a file of tensors."""
    try:
        return FileIO(open_without_waiting(path, follow=True))
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror or error}.") from None


def read_objects(folder: Path, marker: Marker) -> dict[str, Any]:
    """Return the trees in objects.json, after a check that each can be decoded."""
    trees = _read_json(folder / OBJECTS_FILE)
    _check_trees(
        OBJECTS_FILE,
        trees,
        marker,
        [name for name, kind in marker.objects.items() if kind != "rank"],
    )
    metadata = trees.get(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(each, dict) for each in metadata.values()
    ):
        raise CheckpointError(
            f"{OBJECTS_FILE} of {folder.name} has unexpected content: {METADATA_KEY}."
        )
    return trees


def read_rank_state(folder: Path, marker: Marker, name: str) -> dict[str, Any]:
    """Return the content of a rank's own file, after a check that it can be decoded."""
    state = _read_json(folder / name)
    own = [each for each, kind in marker.objects.items() if kind == "rank"]
    if not isinstance(state.get("objects"), dict) or not isinstance(state.get("rng"), dict):
        raise CheckpointError(f"{name} of {folder.name} has unexpected content.")
    _check_trees(name, state["objects"], marker, own)
    state_tree.decode(state["rng"], state_tree.fetch_inline)
    return state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(open_without_waiting(path, follow=True), "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} of {path.parent.name} can't be read: {error}."
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path.name} of {path.parent.name} has unexpected content: it is not an object."
        )
    return found


def _check_trees(file: str, trees: dict[str, Any], marker: Marker, names: list[str]) -> None:
    max_bytes = sum(each.size for each in marker.files.values())
    for name in names:
        if name not in trees:
            raise CheckpointError(f"{file} has no state of {name!r}.")
        try:
            state = state_tree.decode(
                trees[name], lambda entry: state_tree.check_reference(entry, max_bytes=max_bytes)
            )
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {name!r}: {error.message}") from error
        if marker.objects[name] == "module" and not isinstance(state, dict):
            raise CheckpointError(f"{file}: the state of {name!r} is not a dict.")


def read_file(folder: Path, marker: Marker, name: str) -> None:
    """Read what a file of a checkpoint says about itself. Raises CheckpointError if it makes no
    sense.
    """
    if is_share(name):
        with open_share(folder / name) as file:
            read_header(file, name=name, size=os.fstat(file.fileno()).st_size)
    elif name == OBJECTS_FILE:
        read_objects(folder, marker)
    elif name.startswith("state-") and name.endswith(".json"):
        read_rank_state(folder, marker, name)


def read_into(file: FileIO, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous tensor on the host from a file, without a copy and without NumPy, which
    torch doesn't need.
    """
    if not target.nbytes:
        return
    # Its own size decides how much is read: what the file claims could be wrong.
    memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    file.seek(offset)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{file.name} ends before its last tensor does.")
        memory = memory[count:]
