"""Read a complete checkpoint: tensors by name, assembled from the shares that hold their pieces."""

from __future__ import annotations

import ctypes
import json
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.contract.checkpoint.marker import read_marker
from paceline.contract.checkpoint.names import SHARE_SUFFIX
from paceline.contract.checkpoint.safetensors import Piece, read_header
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES


class CheckpointReader:
    """Reads every byte once, directly into its tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = read_marker(folder)
        self._files: list[FileIO] = []
        self._pieces: dict[str, list[tuple[FileIO, int, Piece]]] = {}

    def __enter__(self) -> CheckpointReader:
        for name in sorted(self.marker.files):
            if name.endswith(SHARE_SUFFIX):
                self._open_share(self.folder / name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def _open_share(self, path: Path) -> None:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the reader
        self._files.append(file)
        pieces, begin = read_header(file, name=path.name)
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append((file, begin + piece.offset, piece))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def tensor(self, name: str) -> torch.Tensor:
        parts = self._pieces.get(name)
        if not parts:
            raise CheckpointError(f"{self.folder.name} has no tensor {name}.")
        first = parts[0][2]
        tensor = torch.empty(first.shape, dtype=TORCH_DTYPES[first.dtype])
        if sum(piece.stop - piece.start for _, _, piece in parts) != tensor.numel():
            raise CheckpointError(f"{self.folder.name} holds only a part of {name}.")
        for file, offset, piece in parts:
            _read_into(file, offset, tensor.data_ptr() + piece.start * tensor.element_size(), piece.nbytes)
        return tensor


def _read_into(file: FileIO, offset: int, address: int, size: int) -> None:
    if not size:
        return
    # The tensor's own memory, without a copy and without NumPy, which torch doesn't require.
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    file.seek(offset)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{file.name} ends before its last tensor does.")
        memory = memory[count:]
