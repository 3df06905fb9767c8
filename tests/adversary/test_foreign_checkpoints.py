"""Checkpoints of other users: a hostile one is a clear error, and names no file outside its folder."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pytest

from paceline.contract.checkpoint import (
    CHECKPOINT_MARKER,
    FileChecksum,
    Marker,
    _table_checksum,
    read_marker,
)
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.safetensors import LENGTH, Piece, make_header, read_header
from tests.adversary.test_foreign_records import VALUES, hostile, obstruct

pytestmark = pytest.mark.timeout(60)
PIECE = Piece("w", "F32", (2, 2), 0, 4, 0)


def test_a_hostile_header_is_one_error() -> None:
    good = make_header([PIECE])
    assert read_header(BytesIO(good), name="share")[0] == [PIECE]
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    part = {"name": "w", "start": 0, "shape": [4]}
    texts = list(hostile(("w", "__metadata__"), {"w": entry}))
    texts += [b'{"w": ' + text + b"}" for text in hostile(tuple(entry), dict(entry))]
    for text in hostile(tuple(part), dict(part)):
        cut = b'{"w": ' + text + b"}"
        texts.append(
            json.dumps({"w": entry, "__metadata__": {"cut": cut.decode(errors="replace")}}).encode()
        )
    for text in texts:
        try:
            pieces, _ = read_header(BytesIO(LENGTH.pack(len(text)) + text), name="share")
        except CheckpointError:
            continue
        for piece in pieces:
            assert piece.nbytes >= 0
            assert all(
                type(extent) is int and extent >= 0
                for extent in (*piece.shape, piece.start, piece.offset)
            )
    for length in (2**63, 2**29, 10**6):
        with pytest.raises(CheckpointError):
            read_header(BytesIO(LENGTH.pack(length) + b"{"), name="share")


def write(folder: Path, text: str) -> None:
    """Write a marker whose own checksum is right: that protects against accidents only."""
    table = json.loads(text)
    table["crc32"] = _table_checksum(table)
    (folder / CHECKPOINT_MARKER).write_text(json.dumps(table))


def test_a_hostile_marker_is_one_error(tmp_path: Path) -> None:
    marker = Marker(
        1, 0, 1, "1-1", 1.0, files={"share-00001-of-00001.safetensors": FileChecksum(1, 2)}
    )
    (tmp_path / CHECKPOINT_MARKER).write_text(marker.to_json())
    assert read_marker(tmp_path) == marker
    good = {key: value for key, value in json.loads(marker.to_json()).items() if key != "crc32"}
    for content in hostile(tuple(good), good):
        (tmp_path / CHECKPOINT_MARKER).write_bytes(content)
        with pytest.raises(CheckpointError):  # without a checksum
            read_marker(tmp_path)
    for key in good:
        for value in (value for value in VALUES if len(value) < 1000):
            write(tmp_path, json.dumps({**good, key: json.loads(value)}))
            try:
                read = read_marker(tmp_path)
            except CheckpointError:
                continue
            assert type(read.step) is int
            assert all(type(each.size) is int for each in read.files.values())
    for _ in obstruct(tmp_path / CHECKPOINT_MARKER):
        with pytest.raises(CheckpointError):
            read_marker(tmp_path)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/share.safetensors", "a/../../b", "", "a//b", "./a"]
)
def test_a_marker_names_no_file_outside(tmp_path: Path, name: str) -> None:
    marker = Marker(1, 0, 1, "1-1", 1.0, files={name: FileChecksum(1, 2)})
    (tmp_path / CHECKPOINT_MARKER).write_text(marker.to_json())
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        read_marker(tmp_path)
