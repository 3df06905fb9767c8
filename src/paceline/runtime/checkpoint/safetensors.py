"""The safetensors layout: a length, a JSON header, then the bytes of every tensor without gaps.

A tensor that is split between ranks appears in each file as a flat piece under its
own key; the header's metadata holds the tensor's name and shape and the piece's first element.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import torch

from paceline.contract.foreign_records import parse_object
from paceline.errors import CheckpointError

BLOCK = 4096  # direct writes need memory, offsets and lengths in whole blocks
LENGTH = struct.Struct("<Q")
MAX_HEADER = 1 << 28
MAX_SIZE = 1 << 62  # of anything in a header

# torch's name of a dtype -> the layout's name
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex128": "C128",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

TORCH_DTYPES = {
    short: getattr(torch, long) for long, short in _DTYPES.items() if hasattr(torch, long)
}
DTYPE_NAMES = {dtype: short for short, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of one tensor, and their offset after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    offset: int

    @cached_property
    def is_whole(self) -> bool:
        return self.stop - self.start == math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        size: int = TORCH_DTYPES[self.dtype].itemsize
        return (self.stop - self.start) * size

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def key(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.start}:{self.stop}]"


def make_header(pieces: list[Piece]) -> bytes:
    """Return the length and header of a file, padded so that the data starts at a block."""
    table: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    for piece in pieces:
        shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
        table[piece.key] = {
            "dtype": piece.dtype,
            "shape": list(shape),
            "data_offsets": [piece.offset, piece.end],
        }
        if not piece.is_whole:
            cut[piece.key] = {"name": piece.name, "start": piece.start, "shape": list(piece.shape)}
    table["__metadata__"] = {"format": "pt", "cut": json.dumps(cut)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % BLOCK)
    return LENGTH.pack(len(text)) + text


def read_header(file: IO[bytes], *, name: str, size: int | None = None) -> tuple[list[Piece], int]:
    """Return the pieces of a file and the offset of its data. `name` is the file's name in errors,
    `size` its size.
    """
    try:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        if length > MAX_HEADER:
            raise ValueError(f"it claims {length} bytes")
        table = parse_object(file.read(length))
        cut = parse_object(table.pop("__metadata__", {}).get("cut", "{}"))
        pieces = [_piece(key, entry, cut.get(key)) for key, entry in table.items()]
        start = LENGTH.size + length
        end = start + max((piece.end for piece in pieces), default=0)
        if size is not None and end > size:
            raise ValueError(f"its tensors end at byte {end}, but the file at {size}")
    except (struct.error, ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"The header of {name} can't be read: {error}.") from None
    return pieces, start


def _piece(key: str, entry: dict[str, Any], part: dict[str, Any] | None) -> Piece:
    """Return a piece of the header. Raises ValueError, KeyError or TypeError if the header makes
    no sense.
    """
    begin, end = entry["data_offsets"]
    whole = part or {"name": key, "start": 0, "shape": entry["shape"]}
    name, start, shape = str(whole["name"]), whole["start"], tuple(whole["shape"])
    numbers = (begin, end, start, *shape, *entry["shape"])
    if not all(type(number) is int and 0 <= number < MAX_SIZE for number in numbers):
        raise ValueError(f"{key!r} has an impossible size or place")
    count = math.prod(entry["shape"])
    piece = Piece(name, entry["dtype"], shape, start, start + count, begin)
    if piece.nbytes != end - begin or piece.stop > math.prod(shape):
        raise ValueError(f"{key!r} has {end - begin} bytes, which don't fit its shape")
    return piece
