"""Who runs where: gathered before the process group forms, checked, and printed by rank 0."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.errors import DeviceError, RunError
from paceline.runtime.distributed.affinity import allowed_cpus, format_cpu_list
from paceline.runtime.distributed.device import SHARED_HINT, find_shared_gpu, hardware_id
from paceline.runtime.distributed.identity import Identity

SHOWN = 64  # ranks printed one by one; a larger world is summed up


@dataclass(frozen=True)
class RankPlacement:
    """One rank's place."""

    rank: int
    world_size: int
    host: str
    local_rank: int
    device: str
    hardware: str
    pid: int
    cpus: str

    def line(self) -> str:
        device = f"{self.device} ({self.hardware})" if self.hardware else self.device
        words = (
            f"rank {self.rank} of {self.world_size}", f"node {self.host}", f"local rank {self.local_rank}",
            device, f"pid {self.pid}", f"cpus {self.cpus}",
        )  # fmt: skip
        return " · ".join(words)


def local_placement(identity: Identity, device: torch.device) -> RankPlacement:
    return RankPlacement(
        rank=identity.rank, world_size=identity.world_size, host=socket.gethostname(), local_rank=identity.local_rank,
        device=str(device), hardware=hardware_id(device), pid=os.getpid(), cpus=format_cpu_list(allowed_cpus()),
    )  # fmt: skip


def gather_placements(store: Any, post: RankPlacement) -> list[RankPlacement]:
    """Tell rank 0 where this rank is, and hear its judgement. Rank 0 gets all posts; the others an empty list.

    It goes through the store: two ranks on one GPU must be found before NCCL hangs on them.
    """
    if store is None:
        return [post]
    store.set(f"post/{post.rank}", json.dumps(asdict(post)))
    if post.rank:
        complaint = store.get("judgement").decode()
        if complaint != "fit":
            raise DeviceError(complaint, hint=SHARED_HINT)
        return []
    keys = [f"post/{rank}" for rank in range(post.world_size)]
    store.wait(keys)
    posts = [RankPlacement(**json.loads(text)) for text in store.multi_get(keys)]
    complaint = find_shared_gpu([(each.rank, each.host, each.hardware) for each in posts])
    store.set("judgement", complaint or "fit")
    if complaint:
        raise DeviceError(complaint, hint=SHARED_HINT)
    return posts


def check_world_size(identity: Identity, expected: int | None) -> None:
    """A world of another size than was ordered is an error, not a slow run."""
    if expected is not None and identity.world_size != expected:
        raise RunError(
            f"The job has {expected} ranks, but this process found a world size of {identity.world_size} "
            f"({identity.source}).",
            hint="Check whether your script changes RANK or WORLD_SIZE before it opens the session.",
        )


def print_placements(posts: list[RankPlacement]) -> None:
    """One line per rank, columns aligned; on standard error, which is not the script's own output."""
    rows = [post.line().split(" · ") for post in posts[:SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = [
        " · ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if len(posts) > SHOWN:
        hosts = len({post.host for post in posts})
        lines.append(f"… and {len(posts) - SHOWN} more ranks, on {hosts} nodes in all")
    print("\n".join(lines), file=sys.stderr, flush=True)
