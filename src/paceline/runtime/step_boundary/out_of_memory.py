"""Explain a CUDA out-of-memory error."""

from __future__ import annotations

import torch

from paceline.errors import RunError


def explain_out_of_memory(
    error: BaseException, *, step: int, device: torch.device
) -> RunError | None:
    """Return the error to raise instead, with memory sizes and three ways out; None for any other
    error.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    sizes = "."
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, peak = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
        )
        unused = torch.cuda.memory_reserved(device) - allocated
        sizes = (
            f": {_gib(free)} of {_gib(total)} are free, {_gib(allocated)} are allocated (peak "
            f"{_gib(peak)}), and "
            f"{_gib(unused)} are reserved but unused."
        )
    return RunError(
        f"{device} ran out of memory at step {step}{sizes}",
        hint="Try one of these:\n"
        "  1. Fewer samples per rank at the same global batch: run.loader(..., accumulate=2), or "
        "more ranks.\n"
        '  2. Less memory per sample: session(precision="bf16"), or torch.utils.checkpoint around '
        "large blocks.\n"
        '  3. Sharded parameters and optimizer state: run.wrap(model, mode="fsdp").\n'
        f"  PyTorch's message: {str(error).splitlines()[0]}",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
