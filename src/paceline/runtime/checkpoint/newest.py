"""Which checkpoint to resume from: verified by all ranks together, and the same one for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import marker
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Peers:
    """The ranks of this run, and what they tell each other while they look for a checkpoint."""

    rank: int
    world_size: int
    group: Any

    def from_first(self, ask: Callable[[], list[Path]]) -> list[Path]:
        """What rank 0 finds; the others may see an older state of a network file system."""
        found = ask() if self.rank == 0 else []
        if self.world_size == 1:
            return found
        import torch.distributed as dist

        box: list[Any] = [found]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return list(box[0])

    def from_all(self, word: str | None) -> list[str | None]:
        if self.world_size == 1:
            return [word]
        import torch.distributed as dist

        box: list[str | None] = [None] * self.world_size
        dist.all_gather_object(box, word, group=self.group)
        return box


def damage_of(folder: Path, peers: Peers, *, warn: Callable[[str], None]) -> str | None:
    """By sizes and checksums, each rank looking at its part of the files; all hear of any damage."""
    try:
        files = sorted(marker.read(folder).files.items(), key=lambda item: (-item[1].size, item[0]))
        problem = marker.damage(folder, files[peers.rank :: peers.world_size])
    except CheckpointError as error:
        problem = str(error)
    problems = [each for each in peers.from_all(problem) if each]
    if problems and peers.rank == 0:
        warn(f"checkpoint {folder.name} is skipped: {problems[0]}")
    return problems[0] if problems else None


def sound_one_at(path: Path, peers: Peers, *, warn: Callable[[str], None]) -> Path:
    """The newest sound checkpoint of another run: of its folder, of its checkpoints folder, or that very one."""
    for folder in peers.from_first(lambda: marker.checkpoints_at(path)):
        if damage_of(folder, peers, warn=warn) is None:
            return folder
    raise CheckpointError(
        f"there is no complete checkpoint at {path}",
        hint="give a run folder, its checkpoints folder, or one checkpoint (step-...)",
    )
