"""Rows of runs that are over, kept in one file per user, machine and scratch folder.

The file lies in this user's own folder (mode 0700) in the machine's temporary folder. It only saves
time: if it is missing, damaged or another version's, or cannot be written, the rows are read from
the run folders. Several processes may write it; each replaces it as a whole, and a row that is lost
is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.contract.files.shared_folders import find_own_folder, make_own_folder, open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.watch.overview import Overview

FORMAT = 1
FIELDS = [field.name for field in fields(Overview)]
MAX_SIZE = 256 << 20  # bytes


@dataclass(frozen=True)
class Entry:
    """A row, with what tells whether it is still true."""

    stamp: tuple[int, ...]
    job_start: str  # that had the run folder last
    values: list[Any]  # of the row, in the order of `FIELDS`

    @property
    def row(self) -> Overview:
        # As `Overview(*values)`, which sets each field by a call of its own: a list has thousands
        # of rows.
        row = object.__new__(Overview)
        vars(row).update(zip(FIELDS, self.values, strict=True))
        return row


def load_index(scratch: Path) -> dict[str, Entry]:
    """Return the entries by the path of their run; empty if there is no index, or none that can be
    used.
    """
    folder = find_own_folder(tempfile.gettempdir())
    if folder is None:
        return {}
    try:
        with open(open_own_file(folder / _name(scratch)), "rb") as file:
            head, body = json.loads(file.readline(MAX_SIZE)), file.read(MAX_SIZE)
        if head != _head(scratch, body):
            return {}
        return {
            path: Entry(tuple(stamp), start, values)
            for path, stamp, start, values in json.loads(body)
        }
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def save_index(scratch: Path, entries: dict[str, Entry]) -> None:
    """Replace the index. One that cannot be written is not missed."""
    table = [[path, entry.stamp, entry.job_start, entry.values] for path, entry in entries.items()]
    body = json.dumps(table, separators=(",", ":"))
    try:
        path = make_own_folder(tempfile.gettempdir()) / _name(scratch)
        head = json.dumps(_head(scratch, body.encode()))
        write_atomically(path, f"{head}\n{body}", mode=0o600)
    except OSError:
        pass


def _name(scratch: Path) -> str:
    return f"index-{hashlib.sha256(os.fsencode(os.path.realpath(scratch))).hexdigest()[:16]}"


def _head(scratch: Path, body: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": __version__,
        "scratch": str(scratch),
        "fields": FIELDS,
        "sum": zlib.crc32(body),
    }
