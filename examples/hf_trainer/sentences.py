"""Sentences of a tiny language, each word a token."""

from __future__ import annotations

import random

NOUNS = ["fox", "bird", "cat", "river", "moon"]
ADJECTIVES = ["red", "old", "quiet"]
VERBS = ["sees", "follows", "hears"]
WORDS = ["<end>", "the", "and", *NOUNS, *ADJECTIVES, *VERBS]
LENGTH = 24  # tokens of a sample


def sentence(draw: random.Random) -> list[str]:
    """Return one such as "the old fox hears the moon <end>"."""

    def thing() -> list[str]:
        return [
            "the",
            *([draw.choice(ADJECTIVES)] if draw.random() < 0.5 else []),
            draw.choice(NOUNS),
        ]

    return [*thing(), draw.choice(VERBS), *thing(), "<end>"]


def samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return samples of several sentences in a row, as the Trainer takes them."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        words: list[str] = []
        while len(words) < LENGTH:
            words += sentence(draw)
        tokens = [WORDS.index(word) for word in words[:LENGTH]]
        found.append({"input_ids": tokens, "labels": tokens})
    return found
