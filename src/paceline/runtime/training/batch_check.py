"""Check that tensor-parallel ranks work on the same samples: on different ones, they would train
nonsense.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.checkpoint.shares import digest_state
from paceline.runtime.data.transfer import map_tensors
from paceline.runtime.distributed import collectives
from paceline.runtime.distributed.mesh import RankMesh


def check_batch(batch: Any, mesh: RankMesh, device: torch.device) -> None:
    """Compare a batch between ranks along "tensor". A collective.

    Raises UsageError on all ranks if two of them got different tensors.
    """
    tensors: list[torch.Tensor] = []
    map_tensors(batch, tensors.append)
    digests = [
        int(each)
        for each in collectives.gather(torch.tensor(digest_state([], tensors)), mesh.group, device)
    ]
    for rank, digest in enumerate(digests):
        first = rank // mesh.tensor * mesh.tensor
        if digest != digests[first]:
            raise UsageError(
                f"Ranks {first} and {rank} are tensor-parallel, so they need the same batches, "
                "but got different ones.",
                hint="Use run.loader, or split the data by run.dp_rank and run.dp_size, and "
                "shuffle it with a seed.",
            )
