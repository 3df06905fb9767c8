"""Average gradients over ranks parameter by parameter, whichever of them each rank has used."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import UsageError
from paceline.runtime.console import note

BUCKET_BYTES = 25 * 2**20
PATIENCE = datetime.timedelta(seconds=60)
_NONE, _DENSE, _SPARSE = 0, 1, 2


def agree_on_used(
    parameters: Sequence[nn.Parameter], *, name: str, reductions: int, trainable: bytes, group: Any
) -> list[bool]:
    """Return which parameters have a gradient on any rank.

    Ranks also compare how often they have averaged the model's gradients, and which parameters they
    train: with another answer, they would add up gradients of different losses or parameters.

    Raises:
        UsageError: The ranks differ, or a gradient is sparse.
    """
    pattern = zlib.crc32(trainable)
    kinds = [
        _NONE if (grad := p.grad) is None else _DENSE if grad.layout is torch.strided else _SPARSE
        for p in parameters
    ]
    answers = torch.tensor([*kinds, reductions, -reductions, pattern, -pattern])
    work = dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=group, async_op=True)
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        if work.is_completed():
            raise
        note(
            f"rank {dist.get_rank()} is waiting for other ranks to average the gradients of "
            f"{name}. Did they call "
            "backward on a loss from the model's forward, and this rank did not?"
        )
        work.wait()
    *used, most, minus_least, pattern, minus_pattern = answers.tolist()
    if most != -minus_least:
        raise UsageError(
            f"Gradients of {name} have been averaged {-minus_least} times on one rank, but {most} "
            "times on another.",
            hint="Run the same backward passes on all ranks. A rank that has no loss can use 0.0 "
            "* model(x).sum().",
        )
    if pattern != -minus_pattern:
        raise UsageError(
            f"Ranks differ in which parameters of {name} require gradients.",
            hint="Freeze and unfreeze the same parameters on all ranks, in the same step.",
        )
    if _SPARSE in used:
        raise UsageError(
            f"{name} has sparse gradients that DDP has not averaged.",
            hint="Compute the loss by calling the model, once per backward, or use dense "
            "gradients (sparse=False).",
        )
    return [kind != _NONE for kind in used]


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Average these parameters' gradients over the ranks. A missing gradient counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    size = dist.get_world_size(group)
    pending = []
    for bucket in _buckets(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    ):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(size)
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        parts = torch.split(flat, [grad.numel() for grad in bucket])
        torch._foreach_copy_(
            bucket, [part.view(grad.shape) for part, grad in zip(parts, bucket, strict=True)]
        )


def _buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one type and device, in groups of at most BUCKET_BYTES."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for members in kinds.values():
        bucket, size = list[torch.Tensor](), 0
        for grad in members:
            if bucket and size + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        yield bucket
