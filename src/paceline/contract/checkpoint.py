"""The format of checkpoints on disk: names, the marker that makes one complete, its score; and
folders of weights that a run can start from.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files import open_without_waiting
from paceline.contract.foreign_records import make, read_object
from paceline.errors import CheckpointError

CHECKPOINT_MARKER = "complete.json"  # a checkpoint folder without it is not a checkpoint
# the state of all replicated objects, with references instead of tensors
OBJECTS_FILE = "objects.json"
SHARE_SUFFIX = ".safetensors"
WEIGHTS_SUFFIXES = (SHARE_SUFFIX, ".pt", ".pth", ".bin")  # of files that a run can start from
PARTIAL = ".tmp-"  # step-N.tmp-<attempt>-<save>: being written
REMOVED = ".removed-"  # step-N.removed-<attempt>: being deleted


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in a checkpoint folder's name, or None for a partial or removed one and any
    other name.
    """
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def rank_suffix(rank: int, world_size: int) -> str:
    return f"{rank + 1:05d}-of-{world_size:05d}"


def share_file(rank: int, world_size: int) -> str:
    """Return the name of the file that holds a rank's share of the tensors."""
    return f"share-{rank_suffix(rank, world_size)}{SHARE_SUFFIX}"


def is_weights_file(name: str) -> bool:
    """Return whether a file, by its name, holds a model's weights: in safetensors, or as
    torch.save writes them.
    """
    return name.endswith(WEIGHTS_SUFFIXES)


def is_share(name: str) -> bool:
    """Return whether a file of a checkpoint holds a rank's share of the tensors."""
    return name.endswith(SHARE_SUFFIX) and "/" not in name


def state_file(rank: int, world_size: int) -> str:
    """Return the name of the file that holds a rank's own state."""
    return f"state-{rank_suffix(rank, world_size)}.json"


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
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder.name} has no {path.name}: it was never completed.")
    try:
        table = read_object(path)
        if table.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder.name} has a different format from the one that this version of Paceline "
                f"reads ({FORMAT}).",
                hint="Resume with the version that wrote it.",
            )
        if table.pop("crc32", None) != _table_checksum(table):
            raise CheckpointError(
                f"{path.name} of {folder.name} is damaged: its checksum doesn't match."
            )
        files = {name: make(FileChecksum, entry) for name, entry in table["files"].items()}
        for name in files:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise ValueError(f"it names {name!r}, which is not in the checkpoint")
        marker = make(Marker, {**table, "files": files})
        if checkpoint_step(folder.name) not in (None, marker.step) or marker.world_size < 1:
            raise ValueError(f"it is of step {marker.step} on {marker.world_size} ranks")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} of {folder.name} can't be read: {error}.") from None
    return marker


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


COUNTER = "n_averaged"  # of torch's AveragedModel, which has the model's own weights besides it


def plain_names(keys: Iterable[str]) -> dict[str, str]:
    """Map each key of a model's state to its name without the prefixes that compiled, averaged and
    wrapped models add.
    """
    plain = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    weights = [name for name in plain.values() if name != COUNTER]
    while weights and all(name.startswith("module.") for name in weights):
        plain = {key: name.removeprefix("module.") for key, name in plain.items()}
        weights = [name for name in plain.values() if name != COUNTER]
    return plain


@dataclass(frozen=True)
class Score:
    """The value of a metric, and whether a lower ("min") or a higher one ("max") is better."""

    metric: str
    mode: str
    value: float

    def to_meta(self) -> dict[str, Any]:
        return {"best": asdict(self)}


def is_better(value: float, other: float, mode: str) -> bool:
    return value < other if mode == "min" else value > other


def read_score(marker: Marker) -> Score | None:
    """Return a checkpoint's score; None if it has none, or if its value is NaN."""
    try:
        score = make(Score, marker.meta["best"])
    except (LookupError, TypeError, ValueError):
        return None
    return None if math.isnan(score.value) else score


def choose_best(markers: Iterable[Marker], metric: str, mode: str) -> tuple[int, Score] | None:
    """Return the step with the best score, and the score; of equal ones the newest, which has
    trained longer.
    """
    sign = 1 if mode == "max" else -1
    scores = [
        (marker.step, score)
        for marker in markers
        if (score := read_score(marker)) is not None and score.metric == metric
    ]
    return max(scores, key=lambda each: (sign * each[1].value, each[0]), default=None)


def find_best(folders: Iterable[Path]) -> tuple[int, Score] | None:
    """Return the best step of these checkpoints, newest first, by the newest score's metric; None
    without scores.
    """
    markers = []
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            markers.append(read_marker(folder))
    newest = next(filter(None, map(read_score, markers)), None)
    return choose_best(markers, newest.metric, newest.mode) if newest is not None else None


def find_weight_files(path: Path) -> list[Path]:
    """Return the files of weights of one model in a folder, as those of Hugging Face have them;
    empty for anything else.

    A folder of checkpoints is none, whatever else it has. Raises CheckpointError if some of the
    files are missing.
    """
    if find_checkpoints(path):
        return []
    for name, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if (path / f"{name}{ending}").is_file():
            return [path / f"{name}{ending}"]
        if files := sorted(path.glob(f"{name}-*-of-*{ending}")):
            total = files[-1].stem.rpartition("-")[2]
            if total.isdigit() and len(files) != int(total):
                raise CheckpointError(
                    f"{path} has only {len(files)} of {int(total)} files of weights.",
                    hint="Check that the download is complete.",
                )
            return files
    return []
