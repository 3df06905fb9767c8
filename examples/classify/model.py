"""Text classifiers: a small encoder to train from scratch, or one with weights from Hugging
Face.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """Attention between all real tokens of a text, then two dense layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """A few layers, the mean over the real tokens of a text, and a classification head."""

    def __init__(
        self,
        *,
        vocab: int,
        labels: int,
        length: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, labels)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        real = mask[..., None].to(x.dtype)
        return self.head(self.norm((x * real).sum(1) / real.sum(1)))


class Pretrained(nn.Module):
    """A model of the `transformers` library, from the hub or from a folder, with a new head for
    these labels.
    """

    def __init__(self, name: str, *, labels: list[str]) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            ignore_mismatched_sizes=True,
        )

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=mask.long()).logits


class PretrainedTokenizer:
    """The tokenizer that belongs to such a model."""

    def __init__(self, name: str, *, max_length: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer, self.max_length = AutoTokenizer.from_pretrained(name), max_length
        self.padding = self.tokenizer.pad_token_id or 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
