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
from paceline.contract.checkpoint.names import is_share
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
            if is_share(name):
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
        try:
            return json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} of {self.folder.name} can't be read: {error}.") from None

    def tensor(self, name: str) -> torch.Tensor:
        parts = self._pieces.get(name)
        if not parts:
            raise CheckpointError(f"{self.folder.name} has no tensor {name}.")
        first = parts[0][2]
        tensor = torch.empty(first.shape, dtype=TORCH_DTYPES[first.dtype])
        if sum(piece.stop - piece.start for _, _, piece in parts) != tensor.numel():
            raise CheckpointError(f"{self.folder.name} holds only a part of {name}.")
        flat = tensor.view(-1)
        for file, offset, piece in parts:
            if (piece.shape, piece.dtype) != (first.shape, first.dtype) or not 0 <= piece.start <= piece.stop:
                raise CheckpointError(f"{file.name} holds a part of {name} that doesn't fit the others.")
            read_into(file, offset, flat[piece.start : piece.stop])
        return tensor


def read_into(file: FileIO, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous tensor on the host from a file, without a copy and without NumPy, which torch doesn't need."""
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
