"""How many FLOPs a model needs, for `run.throughput`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def transformer_flops(
    model: torch.nn.Module | int, *, layers: int, width: int, length: int
) -> float:
    """Return the FLOPs that a decoder-only transformer needs per token, for the forward and the
    backward pass.

    6 per parameter, and 12 x layers x width x length for attention, of which half is masked but
    computed, as the convention has it. An input embedding that the output layer doesn't share is a
    look-up, not a matrix product: pass the number of parameters without it instead of the model.

    Args:
        model: The model, or the number of its parameters.
        layers: The number of blocks.
        width: The size of the residual stream.
        length: The number of tokens that attention sees.
    """
    parameters = (
        model if isinstance(model, int) else sum(each.numel() for each in model.parameters())
    )
    return 6.0 * parameters + 12.0 * layers * width * length


def count_flops(function: Callable[[], Any]) -> int:
    """Call a function once, and return the FLOPs of its matrix products and convolutions, as torch
    counts them.

    `count_flops(lambda: loss_of(model(x), y).backward())` counts a whole step. It trains nothing by
    itself, but leaves gradients behind: call it before `optimizer.zero_grad()`.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())
