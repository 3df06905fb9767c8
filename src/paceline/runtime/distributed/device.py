"""Choose the device of a rank, and find ranks that share a GPU."""

from __future__ import annotations

import os

import torch

from paceline.contract import gpus
from paceline.errors import DeviceError
from paceline.runtime.distributed.identity import Identity


def choose_device(identity: Identity, *, cpu: bool = False) -> torch.device:
    """Return cuda, xpu, mps or cpu. If one GPU is visible it is index 0; if several are, it is the
    local rank.

    It is not the current device yet: see `DeviceContext`.
    """
    if cpu:
        return torch.device("cpu")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        return torch.device(kind, _index(identity, module.device_count(), kind))
    # Apple's GPU supports no process group, so it serves a single rank only.
    if not identity.is_distributed and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _index(identity: Identity, visible: int, kind: str) -> int:
    if visible == 1:
        return 0  # the scheduler has bound it; otherwise `rank_placement` finds two ranks on it
    if identity.local_rank < visible:
        return identity.local_rank
    raise DeviceError(
        f"Rank {identity.rank} is local rank {identity.local_rank}, but only {visible} {kind} "
        "devices are visible "
        f"({_visibility()}).",
        hint=f"Start at most {visible} ranks on this node, ask for more GPUs, or use --cpu.",
    )


def _visibility() -> str:
    names = (*gpus.NAMES, "ZE_AFFINITY_MASK")
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return ", ".join(variables) or "CUDA_VISIBLE_DEVICES is not set"


def hardware_id(device: torch.device) -> str:
    """Return an id that is unique to this GPU on its host; empty for a CPU."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return str(getattr(properties, "uuid", "") or f"{device} {properties.name}")
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "uuid", "") or device)
    return ""
