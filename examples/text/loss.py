"""Cross entropy over a large vocabulary, without keeping all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORE = -100  # a target that does not count: padding
LOGIT_ROWS = 8192  # tokens whose logits are in memory at a time


def sum_losses(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies of `hidden @ weight.T`, over the targets that count.

    Logits take tokens x vocabulary: with the 50,257 tokens of GPT-2, they are the largest tensor of
    all.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return SumLosses.apply(hidden, weight, targets)


class SumLosses(torch.autograd.Function):
    """Computes the gradients right in the forward, some rows at a time, so that logits are
    computed once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        needs_grad = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        for start in range(0, len(hidden), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            logits = F.linear(hidden[rows], weight).float()
            norms = logits.logsumexp(dim=1, keepdim=True)
            counts = (targets[rows] != IGNORE)[:, None]
            chosen = targets[rows].clamp(min=0)[:, None]
            total = total + ((norms - logits.gather(1, chosen)) * counts).sum()
            if needs_grad:
                # The gradient of the logits: the probabilities, less 1 for the token that comes
                # next.
                is_chosen = torch.arange(len(weight), device=hidden.device) == chosen
                grad = (((logits - norms).exp() - is_chosen.float()) * counts).to(hidden.dtype)
                grad_hidden[rows] = grad @ weight
                grad_weight += grad.T @ hidden[rows]
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None
