"""Batches of tokenized texts of similar length, padded to the longest text in the batch, with an
attention mask.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Dataset

PADDING, UNKNOWN = 0, 1  # of the vocabulary below
Item = tuple[list[int], int]


class Vocabulary:
    """The most frequent words of some texts, as tokens."""

    padding = PADDING

    def __init__(self, texts: Sequence[str], *, size: int = 8000, max_length: int = 256) -> None:
        counts = Counter(word for text in texts for word in self._split(text))
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
        self.ids = {word: number for number, word in enumerate(frequent, 2)}
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.ids) + 2

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [self.ids.get(word, UNKNOWN) for word in self._split(text)[: self.max_length]]
            for text in texts
        ]

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", re.sub(r"\d+", "0", text.lower())) or [""]


class Texts(Dataset):
    """Pairs of tokens and the number of a label."""

    def __init__(self, tokens: list[list[int]], labels: list[int]) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Item:
        return self.tokens[index], self.labels[index]

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.tokens]

    def by_length(self) -> Texts:
        """Return the same texts, the shortest first: batches of an evaluation then need little
        padding.
        """
        order = sorted(range(len(self)), key=lambda index: len(self.tokens[index]))
        return Texts(
            [self.tokens[index] for index in order], [self.labels[index] for index in order]
        )


class Padding:
    """Collates items: tokens and a mask, as wide as the longest text needs, and the labels."""

    def __init__(self, token: int, *, multiple: int = 8) -> None:
        self.token, self.multiple = token, multiple  # GPUs are fastest with multiples of 8

    def __call__(self, items: list[Item]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        longest = max(len(tokens) for tokens, _ in items)
        width = (longest + self.multiple - 1) // self.multiple * self.multiple
        padded = torch.full((len(items), width), self.token)
        mask = torch.zeros((len(items), width), dtype=torch.bool)
        for row, (tokens, _) in enumerate(items):
            padded[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return padded, mask, torch.tensor([label for _, label in items])


class LengthBuckets:
    """A batch sampler: random batches of texts of similar length, each text once.

    It knows nothing about ranks. `run.loader` seeds the generators, takes each batch as one step,
    and gives every rank its part, so the batches are the same on any number of ranks. The last
    batch may be short.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, pool: int = 20) -> None:
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size
        # texts that are sorted together: more need less padding, fewer are more random
        self.pool = pool * batch_size

    def __len__(self) -> int:
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[torch.Tensor] = []
        for pool in torch.randperm(len(self.lengths)).split(self.pool):
            batches += pool[self.lengths[pool].argsort(stable=True)].split(self.batch_size)
        for number in torch.randperm(len(batches)).tolist():
            batch = batches[number]
            # In random order: otherwise the last rank would always get the longest texts of a
            # batch.
            yield batch[torch.randperm(len(batch))].tolist()
