"""Which rank runs where: its device and the CPUs next to it; and the placements of all ranks, which
are collected before the process group is created, checked, and printed by rank 0.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.contract import gpus
from paceline.errors import DeviceError, RunError
from paceline.runtime.distributed.identity import Identity

MAX_PRINTED = 64  # ranks; larger worlds are summarized
SHARED_HINT = (
    "Start one rank per GPU, and check CUDA_VISIBLE_DEVICES and --gpus-per-task. To "
    "train without GPUs, use --cpu."
)


def choose_device(identity: Identity, *, cpu: bool = False) -> torch.device:
    """Return cuda, xpu, mps or cpu. If one GPU is visible it is index 0; if several are, it is the
    local rank.

    It is not the current device yet: see `activate`.
    """
    if cpu:
        return torch.device("cpu")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            return torch.device(kind, _index(identity, module.device_count(), kind))
    # Apple's GPU supports no process group, so it serves a single rank only.
    if not identity.is_distributed and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _index(identity: Identity, visible: int, kind: str) -> int:
    if visible == 1:
        return 0  # the scheduler has bound it; otherwise `gather_placements` finds two ranks on it
    if identity.local_rank < visible:
        return identity.local_rank
    names = (*gpus.NAMES, "ZE_AFFINITY_MASK")
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    raise DeviceError(
        f"Rank {identity.rank} is local rank {identity.local_rank}, but only {visible} {kind} "
        f"devices are visible ({', '.join(variables) or 'CUDA_VISIBLE_DEVICES is not set'}).",
        hint=f"Start at most {visible} ranks on this node, ask for more GPUs, or use --cpu.",
    )


def activate(device: torch.device) -> None:
    """Make a GPU the current one of this process."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)


def hardware_id(device: torch.device) -> str:
    """Return an id that is unique to this GPU on its host; empty for a CPU."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return str(getattr(properties, "uuid", "") or f"{device} {properties.name}")
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "uuid", "") or device)
    return ""


# -- CPUs
# -----------------------------------------------------------------------------------------------


def allowed_cpus() -> set[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def bind_to_device_cpus(device: torch.device) -> None:
    """Bind this process to the CPUs of its GPU, unless it is already bound (by Slurm or
    taskset).
    """
    allowed = allowed_cpus()
    if device.type != "cuda" or len(allowed) < (os.cpu_count() or 1):
        return
    properties: Any = torch.cuda.get_device_properties(device)
    # binding is an optimization only: the kernel may not list the CPUs, a container forbid it
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        folder = Path(f"/sys/bus/pci/devices/{bus}:{properties.pci_device_id:02x}.0")
        near = parse_cpu_list((folder / "local_cpulist").read_text()) & allowed
        if near:
            os.sched_setaffinity(0, near)
    except (AttributeError, OSError, ValueError):
        return


def parse_cpu_list(text: str) -> set[int]:
    """Read a CPU list such as `0-3,8`."""
    found: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        low, _, high = span.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def format_cpu_list(cpus: set[int]) -> str:
    """Write a CPU list as the kernel does: `0-3,8` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


# -- the placements of all ranks
# -----------------------------------------------------------------------------------------------


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
