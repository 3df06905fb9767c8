"""Find the checkpoint to resume from. All ranks verify it together and use the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import (
    find_checkpoints,
    find_damage,
    list_checkpoints,
    read_marker,
)
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.reader import read_file


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
        import torch.distributed as dist

        objects: list[Any] = [found]
        dist.broadcast_object_list(objects, src=0, group=self.group)
        return list(objects[0])

    def all_gather(self, problem: str | None) -> list[str | None]:
        if self.world_size == 1:
            return [problem]
        import torch.distributed as dist

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
    """Check sizes, checksums and contents, each rank a part of the files. Every rank gets the
    first problem found.
    """
    try:
        marker = read_marker(folder)
        files = sorted(marker.files.items(), key=lambda item: (-item[1].size, item[0]))
        part = files[ranks.rank :: ranks.world_size]
        problem = find_damage(folder, part)
        for name, _ in part if problem is None else ():
            read_file(folder, marker, name)
    except CheckpointError as error:
        problem = error.message.rstrip(".")
    problems = [problem for problem in ranks.all_gather(problem) if problem]
    if problems and ranks.rank == 0:
        warn(f"skipping checkpoint {folder.name}: {problems[0]}")
    return problems[0] if problems else None
