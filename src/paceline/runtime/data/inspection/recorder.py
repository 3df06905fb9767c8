"""Writes the records of one rank."""

from __future__ import annotations

import hashlib
import operator
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from paceline.contract.files.sample_records import Batch, EpochEnd, EpochStart, LoaderFacts, record_path, write_record
from paceline.runtime.distributed.identity import read_identity


class Recorder:
    """The file of this rank. It describes the first loader that is used, and no other."""

    def __init__(self, folder: Path, *, epochs: int, limit: int | None) -> None:
        self.epochs, self.limit = epochs, limit  # limit: steps of each epoch
        self.identity = read_identity()
        self._folder = folder
        self._file: IO[str] | None = None

    @property
    def has_begun(self) -> bool:
        return self._file is not None

    def begin(self, facts: LoaderFacts) -> None:
        self._file = record_path(self._folder, facts.rank).open("w", encoding="utf-8")
        write_record(self._file, facts)

    def add(self, record: EpochStart | Batch | EpochEnd) -> None:
        assert self._file is not None, "begin() comes first"
        write_record(self._file, record)

    def end_process(self) -> NoReturn:
        """End this rank here: all has been recorded, and training would only take time."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def to_key(key: Any) -> int | str:
    """Return a sample's key in a form that can be written."""
    try:
        return operator.index(key)  # also of NumPy and of a tensor
    except TypeError:
        return repr(key)


def digest(item: Any) -> str:
    """Return a short digest of an item's contents."""
    state = hashlib.blake2b(digest_size=8)
    waiting = [item]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            thing = thing.detach().cpu().contiguous()
            state.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            state.update(thing.flatten().view(torch.uint8).numpy().tobytes() if thing.numel() else b"")
        elif isinstance(thing, Mapping):
            # A WebDataset sample names the file that it comes from: that belongs to it.
            waiting += [each for pair in sorted(thing.items(), key=repr) for each in pair]
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, bytes):
            state.update(thing)
        elif hasattr(thing, "tobytes"):
            state.update(thing.tobytes())
        else:
            state.update(repr(thing).encode())
        state.update(b";")
    return state.hexdigest()
