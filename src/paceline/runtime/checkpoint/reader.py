"""Find the newest intact checkpoint, and read it: tensors by name, assembled from the shares that
hold their pieces. All ranks verify it together and use the same one.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract.checkpoint import (
    OBJECTS_FILE,
    find_checkpoints,
    find_damage,
    is_share,
    list_checkpoints,
    read_marker,
    state_file,
)
from paceline.contract.files import open_without_waiting
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import sharded, state_tree
from paceline.runtime.checkpoint.safetensors import TORCH_DTYPES, Piece, read_header


class CheckpointReader:
    """Reads every byte once, directly into its tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = read_marker(folder)
        self._files: list[FileIO] = []
        self._pieces: dict[str, list[tuple[FileIO, int, Piece]]] = {}
        # of sharded tensors, by where they begin: ranks whose meshes are copies of each other have
        # written the same
        self._parts: dict[str, dict[tuple[int, ...], tuple[FileIO, int, Piece]]] = {}

    def __enter__(self) -> CheckpointReader:
        for name in sorted(self.marker.files):
            if is_share(name):
                self._open_share(self.folder / name)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def _open_share(self, path: Path) -> None:
        file = open_share(path)
        self._files.append(file)
        pieces, begin = read_header(file, name=path.name, size=os.fstat(file.fileno()).st_size)
        for piece in pieces:
            place = file, begin + piece.offset, piece
            part = sharded.parse_part(piece.name)
            if part is None:
                self._pieces.setdefault(piece.name, []).append(place)
            else:
                self._parts.setdefault(part[0], {})[part[1]] = place

    def objects(self) -> dict[str, Any]:
        """Return the trees of the objects that all ranks share. Each can be decoded."""
        return _read_json(self.folder / OBJECTS_FILE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return the state of a saved rank, with the trees of its own objects. Each can be
        decoded.
        """
        return _read_json(self.folder / state_file(rank, self.marker.world_size))

    def shape(self, value: Any) -> Sequence[int]:
        """Return the shape of the tensor that a value in a tree refers to; empty if it is none."""
        reference = value if isinstance(value, dict) else {}
        parts = self._pieces.get(reference.get("$tensor", ""))
        return parts[0][2].shape if parts else reference.get("shape", ())

    def read(self, tree: Any, like: Callable[[str], Any]) -> Any:
        """Return the state that a tree is of. `like` returns the tensor that is sharded as a saved
        tensor of this name will be, or anything else.
        """
        known: dict[str, Any] = {}  # tied weights stay one tensor

        def fetch(reference: dict[str, Any]) -> Any:
            if "$sharded" in reference:
                return self._read_part(reference, like(reference["$sharded"]))
            name = reference["$tensor"]
            if name not in known:
                known[name] = sharded.shard_like(self.tensor(name), like(name))
            return known[name]

        return state_tree.decode(tree, fetch)

    def _read_part(self, reference: dict[str, Any], like: Any) -> torch.Tensor:
        """Return a tensor that was sharded, of which each rank reads its own part."""
        name, target = reference["$sharded"], sharded.make_target(reference, like)
        local, begin = sharded.local_part(target)
        missing = local.numel()
        for saved, (file, offset, piece) in self._parts.get(name, {}).items():
            region = sharded.find_overlap(saved, piece.shape, begin, local.shape)
            if region is None:
                continue
            part = torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtype])
            read_into(file, offset, part)
            into = local
            for dim, (source, at, length) in enumerate(region):
                part = part.narrow(dim, source, length)
                into = into.narrow(dim, at, length)
            into.copy_(part)
            missing -= part.numel()
        if missing:
            raise CheckpointError(f"{self.folder.name} holds only a part of {name}.")
        return target

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
            read_into(file, offset, flat[piece.start : piece.stop])
        return tensor


def open_share(path: Path) -> FileIO:
    """Open a file of tensors."""
    try:
        return FileIO(open_without_waiting(path, follow=True))
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror or error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(open_without_waiting(path, follow=True), "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} of {path.parent.name} can't be read: {error}."
        ) from None
    return dict(found)


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


# -- which checkpoint to resume from


@dataclass(frozen=True)
class RankGroup:
    """The ranks that look for a checkpoint together."""

    rank: int
    world_size: int
    group: Any

    def broadcast(self, find: Callable[[], list[Path]]) -> list[Path]:
        """Return what rank 0 finds: other ranks may see an older state of a network file system."""
        found = find() if self.rank == 0 else []
        if self.world_size == 1:
            return found
        objects: list[Any] = [found]
        dist.broadcast_object_list(objects, src=0, group=self.group)
        return list(objects[0])

    def all_gather(self, problem: str | None) -> list[str | None]:
        if self.world_size == 1:
            return [problem]
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, problem, group=self.group)
        return problems


def find_newest(
    folder: Path, ranks: RankGroup, *, warn: Callable[[str], None]
) -> tuple[Path | None, list[Path]]:
    """Return a run's newest intact checkpoint, or None if it has no checkpoints, and the damaged
    ones.
    """
    found = ranks.broadcast(lambda: list_checkpoints(folder))
    damaged: dict[Path, str] = {}
    for path in found:
        problem = verify(path, ranks, warn=warn)
        if problem is None:
            return path, list(damaged)
        damaged[path] = problem
    if found:
        # A run that has come this far must not silently start over.
        problems = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in {folder} is usable ({problems}).",
            hint="To start over from scratch or from start_from, remove them: rm -r "
            f"{folder}/step-*",
        )
    return None, []


def find_start(path: Path, ranks: RankGroup, *, warn: Callable[[str], None]) -> Path:
    """Return the newest intact checkpoint of a run folder or checkpoints folder, or `path` if it
    is one.
    """
    for folder in ranks.broadcast(lambda: find_checkpoints(path)):
        if verify(folder, ranks, warn=warn) is None:
            return folder
    raise CheckpointError(
        f"There is no complete checkpoint at {path}.",
        hint="Give a run folder, its checkpoints folder, or one checkpoint (step-...).",
    )


def verify(folder: Path, ranks: RankGroup, *, warn: Callable[[str], None]) -> str | None:
    """Check sizes and checksums, each rank a part of the files. Every rank gets the
    first problem found.
    """
    try:
        marker = read_marker(folder)
        files = sorted(marker.files.items(), key=lambda item: (-item[1].size, item[0]))
        part = files[ranks.rank :: ranks.world_size]
        problem = find_damage(folder, part)
    except CheckpointError as error:
        problem = error.message.rstrip(".")
    problems = [problem for problem in ranks.all_gather(problem) if problem]
    if problems:
        warn(f"skipping checkpoint {folder.name}: {problems[0]}")
    return problems[0] if problems else None
