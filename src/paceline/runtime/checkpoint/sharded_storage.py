"""The files of sharded state: one of tensors per rank in the safetensors layout, and an index in
JSON.

torch.distributed.checkpoint plans who writes and reads which part. Its own files hold pickles,
which can run any code when they are loaded, so none are written or read here.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from paceline.contract.checkpoint import SHARD_INDEX, FileChecksum, shard_file
from paceline.contract.files import open_without_waiting
from paceline.contract.safetensors import Piece, make_header
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.reader import read_into
from paceline.runtime.checkpoint.state_tree import DTYPE_NAMES, TORCH_DTYPES

WRITE_BYTES = 16 << 20


class ShardWriter(StorageWriter):
    """Writes this rank's parts, on rank 0 also the index, and keeps the checksums of both."""

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        self.folder, self.rank = folder, rank
        self.name = shard_file(rank, world_size)
        self.checksums: dict[str, FileChecksum] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, pieces, tensors = [], [], []
        offset = 0
        for item in plan.items:
            tensor: Any = planner.resolve_data(item)
            tensor = tensor.detach().cpu().contiguous()
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            pieces.append(
                Piece(
                    name=key,
                    dtype=DTYPE_NAMES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    start=0,
                    stop=tensor.numel(),
                    offset=offset,
                    nbytes=tensor.nbytes,
                    is_whole=True,
                )
            )
            tensors.append(tensor)
            results.append(
                WriteResult(item.index, tensor.nbytes, {"file": self.name, "begin": offset})
            )
            offset += tensor.nbytes
        header = make_header(pieces)
        for result in results:
            result.storage_data["begin"] += len(header)
        self.checksums[self.name] = _write(
            self.folder / self.name, [header, *map(_memory, tensors)]
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for each in results for result in each}
        index = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **places[MetadataIndex(name, chunk.offsets)],
                }
                for chunk in entry.chunks
            ]
            dtype = DTYPE_NAMES[entry.properties.dtype]
            index[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        raw = json.dumps(index, separators=(",", ":")).encode()
        self.checksums[SHARD_INDEX] = _write(self.folder / SHARD_INDEX, [raw])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _memory(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor on the host, without a copy."""
    if not tensor.nbytes:
        return b""
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


class ShardReader(StorageReader):
    """Reads the parts that this rank needs, whichever ranks wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = _read_index(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, FileIO] = {}
        try:
            for item in plan.items:
                place = self.metadata.storage_data[item.storage_index]
                name = place["file"]
                if name not in files:
                    files[name] = FileIO(open_without_waiting(self.folder / name, follow=True))
                part = torch.empty(place["sizes"], dtype=place["dtype"])
                read_into(files[name], place["begin"], part)
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        finally:
            for file in files.values():
                file.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _read_index(folder: Path) -> Metadata:
    """Return the index as torch's planners want it."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, dict[str, Any]] = {}
    try:
        for name, entry in json.loads((folder / SHARD_INDEX).read_text(encoding="utf-8")).items():
            dtype = TORCH_DTYPES[entry["dtype"]]
            chunks = []
            for chunk in entry["chunks"]:
                chunks.append(
                    ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                )
                places[MetadataIndex(name, chunk["offsets"])] = {**chunk, "dtype": dtype}
            shape = torch.Size(entry["shape"])
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The index of the sharded state of {folder.parent.name} can't be read: {error}.",
            hint="Remove that checkpoint, or resume with the version of Paceline that wrote it.",
        ) from error
    return Metadata(state_dict_metadata=tensors, storage_data=places)
