"""Short forms of tensors, which ranks record and which are equal if the tensors are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

MAX_ELEMENTS = 4096  # of a row that go into its digest
PROJECTION_SIZE = 2**20  # elements of the fixed vector on which gradients are projected

# A column of a sample: the number of its elements, the digest of all, and the digest without what
# may be padding.
Column = tuple[int, int, int]


def row_digests(tensors: Sequence[torch.Tensor], count: int) -> list[list[Column]]:
    """Return the columns of each of the `count` samples of a batch: one for each tensor that has
    so many rows.
    """
    columns = (
        [rows for each in tensors if (rows := _rows(each, count)) is not None] if count else []
    )
    return [[rows[number] for rows in columns] for number in range(count)] if columns else []


def _rows(tensor: torch.Tensor, count: int) -> list[Column] | None:
    tensor = tensor.detach()
    if tensor.size(0) != count:
        if tensor.dim() < 2 or tensor.size(1) != count:
            return None
        tensor = tensor.transpose(0, 1)  # time comes first
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
        return None
    values = tensor.cpu()
    if values.dtype is torch.bfloat16:
        values = values.float()
    return [_column(row) for row in values]


def _column(row: torch.Tensor) -> Column:
    whole = _digest(row)
    return row.numel(), whole, _digest(_strip(row)) if row.dim() else whole


def _strip(row: torch.Tensor) -> torch.Tensor:
    """Return a sample without slices at the ends of its dimensions that hold nothing but its last
    value.

    The length of padding depends on the longest sample of the batch, and so on the ranks. Nothing
    shows which value is padding: that of a sample without any is its last value. So digests are
    compared with and without it.
    """
    if not row.numel():
        return row
    last = row.reshape(-1)[-1]
    kept = ~row.isnan() if last.isnan() else row != last
    if not kept.any():
        return row
    places = kept.nonzero()
    for dim, end in enumerate((places.amax(0) + 1).tolist()):
        row = row.narrow(dim, 0, end)
    return row


def _digest(row: torch.Tensor) -> int:
    flat = row.reshape(-1)
    if flat.numel() > MAX_ELEMENTS:
        flat = flat[:: -(-flat.numel() // MAX_ELEMENTS)]
    return zlib.crc32(
        flat.contiguous().numpy().tobytes(), zlib.crc32(repr(tuple(row.shape)).encode())
    )


def weights_digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        values = each.detach().reshape(-1).cpu()
        digest = zlib.crc32(
            values.view(torch.uint8).numpy().tobytes() if values.numel() else b"", digest
        )
    return digest


def gradient_summary(gradients: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Return a projection and the norm of each gradient. Projections are linear: a factor shows in
    all of them.
    """
    if not gradients:
        return []
    size = min(PROJECTION_SIZE, max(each.numel() for each in gradients))
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for each in gradients:
        flat = (each.to_dense() if each.is_sparse else each).detach().reshape(-1)
        own = vector.to(flat.device)
        parts = [part.double() for part in torch.split(flat, PROJECTION_SIZE)]
        projection = sum(float(part @ own[: len(part)]) for part in parts)
        found.append((projection, sum(float(part.square().sum()) for part in parts) ** 0.5))
    return found
