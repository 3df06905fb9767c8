"""Text as a file of tokens (uint16) that ranks memory-map: each part is read only when it is
needed, and only once.

`python tokens.py book.txt --tokenizer bpe --folder tokens` makes the file ahead of time, for
example on a login node. If the file doesn't exist, the training script makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loss import IGNORE
from stories import stories
from torch.utils.data import Dataset

END = "<|endoftext|>"  # comes after each document
CHUNK = 1 << 22  # characters that are encoded at a time
VALIDATION = 0.1  # the last part of the tokens


class Bytes:
    """A token for each byte, and one for the end of a document. Nothing to train or to install."""

    vocab, end = 257, 256

    def encode(self, text: str) -> Any:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return bytes(10 if token == self.end else token for token in tokens).decode(
            errors="replace"
        )


class BPE:
    """A tokenizer.json of the `tokenizers` library: trained here, or one that belongs to published
    weights.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self.vocab, self.end = self._tokenizer.get_vocab_size(), self._tokenizer.token_to_id(END)
        if self.vocab > 1 << 16 or self.end is None:
            raise SystemExit(f"{path}: needs at most 65,536 tokens, and {END} as one of them")

    def encode(self, text: str) -> Any:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    @staticmethod
    def train(texts: Iterator[str], path: Path, *, vocab: int) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # all bytes, so that there are no unknown ones
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))


@dataclass(frozen=True)
class Corpus:
    """A folder that `prepare` has made."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Bytes | BPE:
        path = self.folder / "tokenizer.json"
        return BPE(path) if path.exists() else Bytes()

    def blocks(self, part: str, length: int) -> Blocks:
        """Return the training or the validation part."""
        path = self.folder / "tokens.bin"
        total = path.stat().st_size // 2
        cut = total - max(2, int(total * VALIDATION))
        start, stop = (0, cut) if part == "train" else (cut, total)
        if stop - start < 2:
            raise SystemExit(f"the text has {total} tokens, which is too short to train on")
        return Blocks(path, start, stop, length)

    def unigram_perplexity(self) -> float:
        """Return the validation perplexity of a model that only knows how often each token
        occurs.
        """
        counts = np.ones(self.tokenizer.vocab)
        train, validation = self.blocks("train", 1).tokens, self.blocks("validation", 1).tokens
        for start in range(0, len(train), CHUNK):
            counts += np.bincount(train[start : start + CHUNK], minlength=len(counts))
        seen = np.bincount(validation[1:], minlength=len(counts))
        return float(np.exp(-(seen * np.log(counts / counts.sum())).sum() / seen.sum()))


class Blocks(Dataset):
    """Pairs of (tokens, next tokens), cut one after the other. The last one is padded with targets
    that don't count.
    """

    def __init__(self, path: Path, start: int, stop: int, length: int) -> None:
        self.path, self.start, self.stop, self.length = path, start, stop, length

    @cached_property
    def tokens(self) -> Any:
        return np.memmap(self.path, dtype=np.uint16, mode="r")[self.start : self.stop]

    def __len__(self) -> int:
        return math.ceil((self.stop - self.start - 1) / self.length)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = index * self.length
        found = torch.from_numpy(self.tokens[first : first + self.length + 1].astype(np.int64))
        missing = self.length + 1 - len(found)
        pad = torch.nn.functional.pad
        return pad(found[:-1], (0, missing)), pad(found[1:], (0, missing), value=IGNORE)


def prepare(
    source: Path | None, folder: Path, *, tokenizer: str = "bytes", vocab: int = 4096
) -> Corpus:
    """Return the tokens of a text file, of all .txt files below a folder, or of made-up stories.

    `tokenizer` is "bytes", "bpe" (trained on the text, with `vocab` tokens) or the path of a
    tokenizer.json. Any number of processes may do this at once: each writes to its own folder, and
    the first one to finish gives it its name.
    """
    files = find_files(source)
    target = folder / identify(files, tokenizer, vocab)
    if target.exists():
        return Corpus(target)
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=folder))
    try:
        if tokenizer == "bpe":
            BPE.train((text for text, _ in read(files)), partial / "tokenizer.json", vocab=vocab)
        elif tokenizer != "bytes":
            shutil.copy(tokenizer, partial / "tokenizer.json")
        encoder = Corpus(partial).tokenizer
        with open(partial / "tokens.bin", "wb") as file:
            for text, ends in read(files):
                encoder.encode(text).tofile(file)
                if ends:
                    np.array([encoder.end], dtype=np.uint16).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            if not target.exists():  # not made by another process in the meantime
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Corpus(target)


def find_files(source: Path | None) -> list[Path]:
    """Return the files of a text; none stands for the stories."""
    if source is None:
        return []
    files = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not files:
        raise SystemExit(f"no .txt files in {source}")
    return files


def identify(files: list[Path], tokenizer: str, vocab: int) -> str:
    """Return a name for these tokens. It changes if a file, the tokenizer or the stories do."""
    of_files = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
    ]
    of_tokenizer = (
        tokenizer if tokenizer in ("bytes", "bpe") else Path(tokenizer).read_text(encoding="utf-8")
    )
    made = hashlib.sha256(stories().encode()).hexdigest() if not files else None
    described = json.dumps([of_files, of_tokenizer, vocab if tokenizer == "bpe" else None, made])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def read(files: list[Path]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text that end with a line, and whether a document ends there."""
    if not files:
        yield from ((story, True) for story in stories().splitlines())
    for path in files:
        with open(path, encoding="utf-8", errors="replace") as file:
            while text := "".join(file.readlines(CHUNK)):
                yield text, False
        yield "", True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Turn text into a file of tokens.")
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        help="a text file, or a folder of .txt files (made-up stories)",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("tokens"), help="where to write it (tokens)"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, bpe, or a tokenizer.json (bytes)"
    )
    parser.add_argument(
        "--vocab", type=int, default=4096, help="number of tokens that bpe trains (4096)"
    )
    args = parser.parse_args()
    print(prepare(args.data, args.folder, tokenizer=args.tokenizer, vocab=args.vocab).folder)
