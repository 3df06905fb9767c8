"""The GPT-2 architecture in one file, with the parameter names of its published weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from loss import sum_losses
from torch import nn


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    block: int  # tokens that the model sees at once
    lr: float  # a learning rate that works


SIZES = {
    "tiny": Size(layers=2, heads=4, width=64, block=64, lr=5e-3),
    "mini": Size(layers=4, heads=4, width=128, block=128, lr=2e-3),
    "small": Size(layers=6, heads=6, width=384, block=256, lr=1e-3),
    "124M": Size(layers=12, heads=12, width=768, block=1024, lr=6e-4),
}


class Attention(nn.Module):
    """Each token looks at itself and at those before it."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, dropout
        self.c_attn = nn.Linear(size.width, 3 * size.width)
        self.c_proj = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.width, 4 * size.width)
        self.c_proj = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size, dropout)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """GPT-2. The matrix that embeds tokens also turns the last hidden state into logits."""

    def __init__(self, size: Size, *, vocab: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.block = size.block
        self.wte = nn.Embedding(vocab, size.width)
        self.wpe = nn.Embedding(size.block, size.width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)
        # that of GPT-2 at its width; narrow models would start slowly with it
        std = 0.02 * math.sqrt(768 / size.width)
        for name, parameter in self.named_parameters():
            # each block adds two of these to the residual stream
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * size.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the next tokens or, with targets, the sum of the losses of those
        that count.
        """
        x = self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        if torch.is_autocast_enabled(x.device.type):
            # the blocks add to it, and move it through memory
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x, self.wte.weight)
        return sum_losses(x.flatten(0, 1), self.wte.weight, targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: list[int],
        count: int,
        *,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """Return the tokens, followed by `count` more."""
        tokens = list(tokens)
        for _ in range(count):
            # Not up to the last position: of all, a model learns it last.
            seen = torch.tensor(tokens[-self.block * 3 // 4 :], device=self.wte.weight.device)
            # Always the same shape, so that a compiled model is compiled once. What follows has no
            # effect on logits.
            padded = F.pad(seen, (0, self.block - len(seen)))
            logits = self(padded[None])[0, len(seen) - 1].float().cpu()
            tokens.append(
                int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
            )
        return tokens

    def load_gpt2(self, path: Path) -> None:
        """Load weights in safetensors format, as published for GPT-2: a file, or a folder with
        model.safetensors.
        """
        from safetensors.torch import load_file

        loaded = load_file(path / "model.safetensors" if path.is_dir() else path)
        named = {name.removeprefix("transformer."): tensor for name, tensor in loaded.items()}
        # not lm_head, not the masks
        kept = {name: named[name] for name in self.state_dict() if name in named}
        for name, tensor in kept.items():
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                kept[name] = tensor.t()  # GPT-2 stores its matrices as (inputs, outputs)
        self.load_state_dict(kept)
