"""State that is cut over a device mesh (FSDP2, DTensor) goes through torch.distributed.checkpoint.

It is staged in the image like everything else, and written from the writer thread over a process group of its
own, so that its collectives never meet those of the training.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint.marker import Whole, checksum
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.image import Image
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES, dtensor_class

FOLDER = "sharded"


def new_group(timeout: float) -> Any:
    """A gloo group for the writers alone. Every rank calls this, at the same place."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def staged(image: Image, sharded: Mapping[str, Any]) -> dict[str, Any]:
    """The sharded tensors with their local parts replaced by the copies in the image."""
    dtensor = dtensor_class()
    # from_local would move the copy to the mesh's device; the constructor takes it as it is.
    return {
        name: dtensor(image.local(name), tensor._spec, requires_grad=False)
        for name, tensor in sharded.items()
    }


def write(folder: Path, tensors: Mapping[str, Any], *, group: Any, rank: int) -> dict[str, Whole]:
    """Write this rank's parts (a collective of all writers); its files, and on rank 0 the index."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    there = folder / FOLDER
    save(dict(tensors), storage_writer=FileSystemWriter(there), process_group=group, **_alone(save, group))
    mine = [*there.glob(f"__{rank}_*"), *([there / ".metadata"] if rank == 0 else [])]
    return {f"{FOLDER}/{path.name}": checksum(path) for path in mine}


def read(folder: Path, targets: dict[str, Any], *, group: Any) -> None:
    """Fill the targets in place, each rank its own part, whatever number of ranks wrote them (a collective)."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(
            targets,
            storage_reader=FileSystemReader(folder / FOLDER),
            process_group=group,
            **_alone(load, group),
        )
    except Exception as error:
        raise CheckpointError(f"the sharded state of {folder.name} cannot be loaded: {error}") from error


def _alone(function: Any, group: Any) -> dict[str, Any]:
    """Newer versions of torch are told that there are no peers; older ones find out by themselves."""
    if group is None and "no_dist" in inspect.signature(function).parameters:
        return {"no_dist": True}
    return {}


def target(entry: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor for a saved sharded one. `like` is what it belongs to now: itself, or its parameter."""
    dtype, shape = TORCH_DTYPES[entry["dtype"]], list(entry["shape"])
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(like, dtensor):
        return torch.empty(shape, dtype=dtype)
    if list(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype)
    # Optimizer state of another shape than its parameter: on the same mesh, cut as it was if that still fits.
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = like.device_mesh
    saved = [Shard(int(word[1:])) if word[0] == "S" else Replicate() for word in entry["placements"]]
    placements = saved if len(saved) == mesh.ndim else [Replicate()] * mesh.ndim
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def spread(whole: torch.Tensor, like: Any) -> Any:
    """A whole tensor, which every rank has, cut as `like` is. No communication: each rank keeps its part."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    local = whole.to(mesh.device_type)
    everywhere = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)
