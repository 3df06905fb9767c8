"""BatchNorm with the statistics of the global batch, on any device. torch's SyncBatchNorm needs a
GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def synchronized_batch_norm(
    input: torch.Tensor, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    """Normalize a batch in training mode. Running statistics stay as they are: training does not
    use them.
    """
    dims = [0, *range(2, input.dim())]
    count = torch.tensor([input.numel() / input.size(1)], dtype=input.dtype, device=input.device)
    count = _sum(count)
    mean = _sum(input.sum(dims)) / count
    centred = input - _channels(mean, input)
    variance = _sum(centred.square().sum(dims)) / count
    output = centred * _channels((variance + eps).rsqrt(), input)
    if weight is not None:
        output = output * _channels(weight, input)
    return output if bias is None else output + _channels(bias, input)


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks; gradients flow back to each of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    from torch.distributed.nn.functional import all_reduce

    found: torch.Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return found
