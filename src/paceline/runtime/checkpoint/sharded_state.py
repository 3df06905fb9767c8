"""Save and load state sharded over a device mesh, planned by torch.distributed.checkpoint.

It is staged in the image like everything else. The writer threads use a separate process group, so
that their collectives never mix with those of the training.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import SHARDED_FOLDER, FileChecksum
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.save_buffer import Image
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES, dtensor_class


def new_group(timeout: float) -> Any:
    """Create a gloo group for the writers. A collective: every rank must call it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def stage(image: Image, sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sharded tensors with their local parts replaced by the copies in the image."""
    dtensor = dtensor_class()
    # from_local would move the copy to the mesh's device; the constructor leaves it on the host.
    return {
        name: dtensor(image.local(name), tensor._spec, requires_grad=False)
        for name, tensor in sharded.items()
    }


def write(
    folder: Path, tensors: Mapping[str, Any], *, group: Any, rank: int, world_size: int
) -> dict[str, FileChecksum]:
    """Write this rank's parts (a collective) and return its files, on rank 0 with the index."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from paceline.runtime.checkpoint.sharded_storage import ShardWriter

    writer = ShardWriter(folder / SHARDED_FOLDER, rank=rank, world_size=world_size)
    with _as_checkpoint_error("The sharded state can't be written"):
        save(
            dict(tensors),
            storage_writer=writer,
            process_group=group,
            **_single_process_options(save, group),
        )
    return {f"{SHARDED_FOLDER}/{name}": checksum for name, checksum in writer.checksums.items()}


def read(folder: Path, targets: dict[str, Any], *, group: Any) -> None:
    """Fill the targets in place, each rank its own part (a collective). Any number of ranks may
    have saved them.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    from paceline.runtime.checkpoint.sharded_storage import ShardReader

    reader = ShardReader(folder / SHARDED_FOLDER)
    with (
        _as_checkpoint_error(f"The sharded state of {folder.name} can't be loaded"),
        warnings.catch_warnings(),
    ):
        # which is as it should be
        warnings.filterwarnings("ignore", message="torch.distributed is .*single process")
        load(
            targets,
            storage_reader=reader,
            process_group=group,
            **_single_process_options(load, group),
        )


@contextmanager
def _as_checkpoint_error(problem: str) -> Iterator[None]:
    """Raise a CheckpointError for any error of torch's, of which some are not even an Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{problem}: rank {rank}: {str(cause).rstrip('.')}.") from error
    except Exception as error:
        raise CheckpointError(f"{problem}: {str(error).rstrip('.')}.") from error


def _single_process_options(function: Any, group: Any) -> dict[str, Any]:
    """Newer versions of torch need an option for a single process; older ones detect it."""
    if group is None and "no_dist" in inspect.signature(function).parameters:
        return {"no_dist": True}
    return {}


def make_target(entry: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor for a saved sharded one, with the placements of `like` (itself or its
    parameter).
    """
    dtype, shape = TORCH_DTYPES[entry["dtype"]], list(entry["shape"])
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(like, dtensor):
        return torch.empty(shape, dtype=dtype)
    if list(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype)
    # Optimizer state whose shape differs from its parameter: the same mesh, and the saved
    # placements if they fit.
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = like.device_mesh
    saved = [
        Shard(int(code[1:])) if code[0] == "S" else Replicate() for code in entry["placements"]
    ]
    placements = saved if len(saved) == mesh.ndim else [Replicate()] * mesh.ndim
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def distribute(tensor: torch.Tensor, like: Any) -> Any:
    """Shard a tensor that every rank holds in full as `like` is. Each rank takes its part, without
    communication.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    local = tensor.to(mesh.device_type)
    replicated = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)
