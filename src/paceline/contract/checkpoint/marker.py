"""The marker that makes a checkpoint complete. It lists every file with its size and checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.names import CHECKPOINT_MARKER, checkpoint_step
from paceline.contract.files.foreign_records import make, read_object
from paceline.contract.files.shared_folders import open_without_waiting
from paceline.errors import CheckpointError

FORMAT = 1
KINDS = ("module", "optimizer", "state", "rank")
CHUNK = 8 << 20

# crc32 finds every flipped byte and every lost block, releases the interpreter while it runs (2
# GB/s measured, against 0.6 for blake2b), and any tool can check it. It protects against accidents,
# not against attackers.


@dataclass(frozen=True)
class FileChecksum:
    """The size and checksum of a complete file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Marker:
    """The content of a checkpoint's marker."""

    step: int
    epoch: int
    world_size: int
    save: str  # attempt and number of the save
    time: float
    meta: Any = None
    # name -> "module", "optimizer", "state" or "rank"
    objects: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileChecksum] = field(default_factory=dict)
    tensor: int = 1  # how many neighbouring ranks worked on the same samples
    format: int = FORMAT

    def to_json(self) -> str:
        table = asdict(self)
        return json.dumps({**table, "crc32": _table_checksum(table)}, indent=1) + "\n"


def _table_checksum(table: dict[str, Any]) -> int:
    """Return the marker's own checksum: a flipped byte could change the step or the list of
    files.
    """
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())


def read_marker(folder: Path) -> Marker:
    """Return a checkpoint's marker, or raise an error that says why it can't be read."""
    path = folder / CHECKPOINT_MARKER
    try:
        table = read_object(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder.name} has no {path.name}: it was never completed."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} of {folder.name} can't be read: {error}.") from None
    if table.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder.name} has a different format from the one that this version of Paceline "
            f"reads ({FORMAT}).",
            hint="Resume with the version that wrote it.",
        )
    if _table_checksum({key: value for key, value in table.items() if key != "crc32"}) != table.get(
        "crc32"
    ):
        raise CheckpointError(
            f"{path.name} of {folder.name} is damaged: its checksum doesn't match."
        )
    del table["crc32"]
    try:
        files = {name: make(FileChecksum, entry) for name, entry in table.pop("files").items()}
        if outside := [name for name in files if not _is_inside(name)]:
            raise ValueError(f"it names {outside[0]!r}, which is not in the checkpoint")
        marker = make(Marker, {**table, "files": files})
        _check_ranges(marker, step=checkpoint_step(folder.name))
        return marker
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} of {folder.name} has unexpected content: {error}."
        ) from None


def _check_ranges(marker: Marker, *, step: int | None) -> None:
    """Raise ValueError if a value is impossible. `step` is that of the folder's name."""
    if marker.step < 0 or (step is not None and marker.step != step):
        raise ValueError(f"step is {marker.step}")
    # Every rank has written at least one file.
    if (
        not 1 <= marker.tensor <= marker.world_size <= max(1, len(marker.files))
        or marker.world_size % marker.tensor
    ):
        raise ValueError(f"world_size is {marker.world_size}, and tensor {marker.tensor}")
    if marker.epoch < 0 or any(each.size < 0 for each in marker.files.values()):
        raise ValueError("a number is negative")
    if unknown := set(marker.objects.values()) - set(KINDS):
        raise ValueError(f"an object is a {min(unknown)!r}")
    position = marker.meta.get("position", {}) if isinstance(marker.meta, dict) else marker.meta
    if not isinstance(position, dict | None) or (position and not _is_position(position)):
        raise ValueError("meta holds no position")


def _is_position(position: dict[str, Any]) -> bool:
    loop, loader = position.get("loop", 0), position.get("loader")
    return type(loop) is int and loop >= 0 and isinstance(loader, dict | None)


def _is_inside(name: str) -> bool:
    """Return whether a file's name leads to a place in the checkpoint's folder."""
    return bool(name) and not any(part in ("", ".", "..") for part in name.split("/"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, complete or not."""
    try:
        names = os.listdir(folder)  # asks NFS again, where a stat may answer from its cache
    except OSError:
        return []
    steps = {name: checkpoint_step(name) for name in names}
    found = [(step, name) for name, step in steps.items() if step is not None]
    return [folder / name for _, name in sorted(found, reverse=True)]


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder or checkpoints folder, newest first, or `path` if it
    is one.
    """
    if is_complete(path):
        return [path]
    return list_checkpoints(path / "checkpoints") or list_checkpoints(path)


def is_complete(folder: Path) -> bool:
    return (folder / CHECKPOINT_MARKER).is_file()


def compute_checksum(path: Path) -> FileChecksum:
    """Return the size and checksum of a file as it is now."""
    crc = size = 0
    buffer = memoryview(bytearray(CHUNK))
    with open(open_without_waiting(path, follow=True), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return FileChecksum(size, crc)


def find_damage(folder: Path, files: Iterable[tuple[str, FileChecksum]]) -> str | None:
    """Describe the first of these files that differs from the marker; None if all are intact."""

    def check(item: tuple[str, FileChecksum]) -> str | None:
        name, expected = item
        try:
            size = os.stat(folder / name).st_size
            if size != expected.size:
                return f"{name} has {size} bytes instead of {expected.size}"
            found = compute_checksum(folder / name)
        except OSError as error:
            return f"{name} can't be read: {error.strerror or error}"
        if found != expected:
            return f"{name} has checksum {found.crc32:08x} instead of {expected.crc32:08x}"
        return None

    # not at the top: commands that only list checkpoints start fast
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=4) as pool:
        return next((problem for problem in pool.map(check, files) if problem), None)
