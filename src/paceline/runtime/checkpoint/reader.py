"""A complete checkpoint, opened for reading: tensors by name, put together from the shares they were cut into."""

from __future__ import annotations

import ctypes
import json
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.contract.checkpoint import marker, safetensors
from paceline.contract.checkpoint.safetensors import LENGTH, LONGEST_HEADER, Piece
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES


class Source:
    """Reads every byte once, straight into the tensor that it belongs to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = marker.read(folder)
        self._open: list[FileIO] = []
        self._pieces: dict[str, list[tuple[FileIO, int, Piece]]] = {}

    def __enter__(self) -> Source:
        for name in sorted(self.marker.files):
            if name.endswith(".safetensors"):
                self._open_share(self.folder / name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for file in self._open:
            file.close()
        self._open.clear()

    def _open_share(self, path: Path) -> None:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the source
        self._open.append(file)
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{path.name} claims a header of {length} bytes")
        file.seek(0)
        pieces, begin = safetensors.parse(file.read(LENGTH.size + length), where=path.name)
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append((file, begin + piece.offset, piece))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def tensor(self, name: str) -> torch.Tensor:
        parts = self._pieces.get(name)
        if not parts:
            raise CheckpointError(f"{self.folder.name} has no tensor {name}")
        first = parts[0][2]
        whole = torch.empty(first.shape, dtype=TORCH_DTYPES[first.dtype])
        if sum(piece.stop - piece.start for _, _, piece in parts) != whole.numel():
            raise CheckpointError(f"{self.folder.name} holds only a part of {name}")
        for descriptor, offset, piece in parts:
            _read_into(
                descriptor, offset, whole.data_ptr() + piece.start * whole.element_size(), piece.nbytes
            )
        return whole


def _read_into(file: FileIO, offset: int, address: int, size: int) -> None:
    if not size:
        return
    # The tensor's own memory, without a copy and without NumPy, which torch may be installed without.
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    file.seek(offset)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError("a share ended before its last tensor did")
        memory = memory[count:]
