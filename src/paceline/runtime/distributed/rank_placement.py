"""Which rank runs where: collected before the process group is created, checked, and printed by
rank 0.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.errors import DeviceError, RunError
from paceline.runtime.distributed.device import allowed_cpus, format_cpu_list, hardware_id
from paceline.runtime.distributed.identity import Identity

MAX_PRINTED = 64  # ranks; larger worlds are summarized
SHARED_HINT = (
    "Start one rank per GPU, and check CUDA_VISIBLE_DEVICES and --gpus-per-task. To "
    "train without GPUs, use --cpu."
)


@dataclass(frozen=True)
class RankPlacement:
    """The host and the GPU of one rank, and the line that describes it."""

    rank: int
    host: str
    hardware: str
    line: str


def local_placement(identity: Identity, device: torch.device) -> RankPlacement:
    """Return the placement of this rank."""
    host, hardware = socket.gethostname(), hardware_id(device)
    parts = [
        f"rank {identity.rank} of {identity.world_size}",
        f"node {host}",
        f"local rank {identity.local_rank}",
        f"{device} ({hardware})" if hardware else str(device),
        f"pid {os.getpid()}",
        f"cpus {format_cpu_list(allowed_cpus())}",
    ]
    return RankPlacement(identity.rank, host, hardware, " · ".join(parts))


def find_shared_gpu(placements: Sequence[RankPlacement]) -> str | None:
    """Return an error message if two ranks share a GPU, else None."""
    seen: dict[tuple[str, str], int] = {}
    for each in placements:
        first = seen.setdefault((each.host, each.hardware), each.rank)
        if each.hardware and first != each.rank:
            return (
                f"Ranks {first} and {each.rank} are on the same GPU of node {each.host} "
                f"({each.hardware})."
            )
    return None


def gather_placements(store: Any, placement: RankPlacement, world_size: int) -> list[RankPlacement]:
    """Send this rank's placement to rank 0, which checks all of them. Returns them on rank 0, and
    [] elsewhere.

    This uses the store, because two ranks on one GPU must be found before NCCL hangs on them.
    Raises DeviceError on all ranks if there are two.
    """
    if store is None:
        return [placement]
    store.set(f"placement/{placement.rank}", json.dumps(asdict(placement)))
    if placement.rank:
        problem = store.get("placement_check").decode()
        if problem != "ok":
            raise DeviceError(problem, hint=SHARED_HINT)
        return []
    keys = [f"placement/{rank}" for rank in range(world_size)]
    store.wait(keys)
    placements = [RankPlacement(**json.loads(text)) for text in store.multi_get(keys)]
    shared = find_shared_gpu(placements)
    store.set("placement_check", shared or "ok")
    if shared:
        raise DeviceError(shared, hint=SHARED_HINT)
    return placements


def check_world_size(identity: Identity, expected: int | None) -> None:
    """Raise RunError if the world size is not the one that the job asked for."""
    if expected is not None and identity.world_size != expected:
        raise RunError(
            f"The job has {expected} ranks, but this process found a world size of "
            f"{identity.world_size} "
            f"({identity.source}).",
            hint="Check whether your script changes RANK or WORLD_SIZE before it opens the "
            "session.",
        )


def print_placements(placements: list[RankPlacement]) -> None:
    """Print one line per rank to standard error, which is not the script's own output."""
    lines = [placement.line for placement in placements[:MAX_PRINTED]]
    if len(placements) > MAX_PRINTED:
        hosts = len({placement.host for placement in placements})
        lines.append(f"… and {len(placements) - MAX_PRINTED} more ranks, on {hosts} nodes in total")
    print("\n".join(lines), file=sys.stderr, flush=True)
