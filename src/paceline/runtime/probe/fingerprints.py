"""Short forms of tensors, which ranks record and which are equal if the tensors are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

MAX_ELEMENTS = 4096  # of a row that go into its digest
GRADIENT_SAMPLE = 256  # elements of all gradients together


def row_digests(tensors: Sequence[torch.Tensor], count: int) -> list[int]:
    """Return a digest for each of the `count` samples of a batch, over all tensors that have so many rows."""
    columns = [rows for each in tensors if (rows := _rows(each, count)) is not None]
    return [zlib.crc32(b"".join(rows[number] for rows in columns)) for number in range(count)] if columns else []


def _rows(tensor: torch.Tensor, count: int) -> list[bytes] | None:
    tensor = tensor.detach()
    if tensor.size(0) != count:
        if tensor.dim() < 2 or tensor.size(1) != count:
            return None
        tensor = tensor.transpose(0, 1)  # time comes first
    flat = tensor.reshape(count, -1).cpu()
    is_padded = tensor.dim() == 2 and not tensor.is_floating_point()
    if flat.size(1) > MAX_ELEMENTS:
        flat = flat[:, :: -(-flat.size(1) // MAX_ELEMENTS)]
    values = flat.contiguous()
    if values.dtype is torch.bfloat16:
        values = values.float()
    return [_strip(row) if is_padded else row.numpy().tobytes() for row in values]


def _strip(row: torch.Tensor) -> bytes:
    """Return a row of tokens without its padding, whose length depends on the longest row of the batch."""
    found = row.tolist()
    end = len(found)
    while end > 1 and found[end - 1] == found[-1]:
        end -= 1
    return repr(found[:end]).encode()


def weights_digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        values = each.detach().reshape(-1).cpu()
        digest = zlib.crc32(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"", digest)
    return digest


def gradient_sample(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Return evenly spaced elements of all gradients, as many of each tensor as its share."""
    total = sum(each.numel() for each in gradients)
    stride = max(1, total // GRADIENT_SAMPLE)
    found: list[float] = []
    for each in gradients:
        found += each.detach().reshape(-1)[::stride].double().tolist()
    return found
