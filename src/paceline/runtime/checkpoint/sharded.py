"""State sharded over a device mesh (FSDP2, DTensor): one file of tensors per rank, and an index.

Each rank writes its own parts of the tensors from the image; rank 0 makes the index of the parts
from the reports of all ranks. To load, each rank copies what its own parts overlap with, whichever
ranks wrote it.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import SHARD_INDEX, SHARDED_FOLDER, FileChecksum, shard_file
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.reader import open_share, read_into
from paceline.runtime.checkpoint.safetensors import Piece, make_header
from paceline.runtime.checkpoint.save_buffer import Image
from paceline.runtime.checkpoint.state_tree import DTYPE_NAMES, TORCH_DTYPES, dtensor_class

WRITE_BYTES = 16 << 20


def own_parts(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return where this rank's parts are in the tensors. Of copies, the first rank's count."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parts = {}
    for name, tensor in tensors.items():
        mesh, placements = tensor.device_mesh, tensor.placements
        if not tensor.to_local().numel():
            continue
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        place = zip(placements, mesh.get_coordinate(), strict=True)
        if not any(each.is_replicate() and number for each, number in place):
            parts[name] = {"offsets": list(offsets), "sizes": list(sizes)}
    return parts


def write(
    folder: Path, image: Image, parts: Mapping[str, dict[str, Any]], *, rank: int, world_size: int
) -> tuple[dict[str, FileChecksum], dict[str, dict[str, Any]]]:
    """Write this rank's parts. Return its files, and the parts with their places in them."""
    file, offset = shard_file(rank, world_size), 0
    pieces, places = [], {}
    for name, part in parts.items():
        tensor = image.local(name)
        pieces.append(
            Piece(
                name=f"{name}@{','.join(map(str, part['offsets']))}",
                dtype=DTYPE_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                start=0,
                stop=tensor.numel(),
                offset=offset,
                nbytes=tensor.nbytes,
                is_whole=True,
            )
        )
        places[name] = {**part, "file": file, "begin": offset}
        offset += tensor.nbytes
    header = make_header(pieces)
    for place in places.values():
        place["begin"] += len(header)
    (folder / SHARDED_FOLDER).mkdir(parents=True, exist_ok=True)
    content = [header, *(_memory(image.local(name)) for name in parts)]
    return {f"{SHARDED_FOLDER}/{file}": _write(folder / SHARDED_FOLDER / file, content)}, places


def write_index(
    folder: Path, tensors: Mapping[str, dict[str, Any]], reports: list[dict[str, Any]]
) -> dict[str, FileChecksum]:
    """Write where all ranks have written their parts of these tensors."""
    index = {}
    for name, tensor in tensors.items():
        parts = [report[name] for report in reports if name in report]
        # one of each: ranks whose meshes are copies of each other have written the same
        chunks = {tuple(part["offsets"]): part for part in parts}
        index[name] = {**tensor, "chunks": list(chunks.values())}
    raw = json.dumps(index, separators=(",", ":")).encode()
    return {f"{SHARDED_FOLDER}/{SHARD_INDEX}": _write(folder / SHARDED_FOLDER / SHARD_INDEX, [raw])}


def _memory(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor on the host, without a copy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write(path: Path, parts: list[Any]) -> FileChecksum:
    crc = size = 0
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            for begin in range(0, len(part), WRITE_BYTES):
                chunk = memoryview(part)[begin : begin + WRITE_BYTES]
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileChecksum(size, crc)


def read(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill the targets in place, each rank its own part."""
    folder = folder / SHARDED_FOLDER
    try:
        index = json.loads((folder / SHARD_INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The index of the sharded state of {folder.parent.name} can't be read: {error}.",
            hint="Remove that checkpoint, or resume with the version of Paceline that wrote it.",
        ) from error
    files: dict[str, FileIO] = {}
    with ExitStack() as stack:
        for name, target in targets.items():
            local, offsets = _local_part(target)
            missing = local.numel()
            for chunk in index[name]["chunks"]:
                region = _overlap(chunk["offsets"], chunk["sizes"], offsets, local.shape)
                if region is None:
                    continue
                file = chunk["file"]
                if file not in files:
                    files[file] = stack.enter_context(open_share(folder / file))
                part = torch.empty(chunk["sizes"], dtype=TORCH_DTYPES[index[name]["dtype"]])
                read_into(files[file], chunk["begin"], part)
                into = local
                for dim, (source, at, length) in enumerate(region):
                    part = part.narrow(dim, source, length)
                    into = into.narrow(dim, at, length)
                into.copy_(part)
                missing -= part.numel()
            if missing:
                raise CheckpointError(f"{folder.parent.name} holds only a part of {name}.")


def _local_part(target: Any) -> tuple[torch.Tensor, list[int]]:
    """Return this rank's part of a tensor, and where it begins in each dimension."""
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(target, dtensor):
        return target.detach(), [0] * target.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return target.to_local().detach(), list(offsets)


def _overlap(
    saved: list[int], saved_sizes: list[int], own: list[int], own_sizes: torch.Size
) -> list[tuple[int, int, int]] | None:
    """Return for each dimension where the overlap begins in a saved part and in an own one, and its
    length. None if there is no overlap.
    """
    region = []
    for first, size, begin, extent in zip(saved, saved_sizes, own, own_sizes, strict=True):
        low, high = max(first, begin), min(first + size, begin + extent)
        if low >= high:
            return None
        region.append((low - first, low - begin, high - low))
    return region


def make_target(entry: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor for a saved sharded one, with the placements of `like` (itself or its
    parameter).
    """
    dtype, shape = TORCH_DTYPES[entry["dtype"]], list(entry["shape"])
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(like, dtensor):
        return torch.empty(shape, dtype=dtype)
    if list(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype)
    # Optimizer state whose shape differs from its parameter: the same mesh, and the saved
    # placements if they fit.
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = like.device_mesh
    saved = [
        Shard(int(code[1:])) if code[0] == "S" else Replicate() for code in entry["placements"]
    ]
    placements = saved if len(saved) == mesh.ndim else [Replicate()] * mesh.ndim
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def distribute(tensor: torch.Tensor, like: Any) -> Any:
    """Shard a tensor that every rank holds in full as `like` is. Each rank takes its part, without
    communication.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    local = tensor.to(mesh.device_type)
    replicated = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)
