"""Writes the records of one rank, in a file for each of its loaders."""

from __future__ import annotations

import hashlib
import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from paceline.contract.rank_records import Items, LoaderFacts, Record, record_path, write_record
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.randomness import seed_host

COMPARED_ITEMS = 8  # at the beginning of a map-style dataset


class LoaderRecords:
    """The file of one loader."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, record: Record) -> None:
        write_record(self._file, record)


class Recorder:
    """What to record of the loaders of this rank, and where."""

    def __init__(self, folder: Path, *, epochs: int, limit: int | None) -> None:
        self.epochs, self.limit = epochs, limit  # limit: steps of each epoch
        self.identity = read_identity()
        self._folder = folder
        self._loaders = 0

    def begin(self, facts: LoaderFacts) -> LoaderRecords:
        """Return the records of another loader."""
        file = record_path(self._folder, facts.rank, self._loaders).open("w", encoding="utf-8")
        records = LoaderRecords(file)
        records.add(replace(facts, number=self._loaders))
        self._loaders += 1
        return records

    def end_process(self) -> NoReturn:
        """End this rank here: all has been recorded, and training would only take time."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def read_items(dataset: Any) -> Items:
    """Read the first items of a map-style dataset twice, both times with the same random
    numbers.
    """
    digests: list[str | None] = []
    try:
        for index in range(min(COMPARED_ITEMS, len(dataset))):
            found = set()
            for _ in range(2):
                seed_host(index)
                found.add(digest(dataset[index]))
            digests.append(found.pop() if len(found) == 1 else None)
    except Exception:  # whatever the script's dataset raises: then its items are not known
        return Items([])
    return Items(digests)


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
            state.update(
                thing.flatten().view(torch.uint8).numpy().tobytes() if thing.numel() else b""
            )
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
