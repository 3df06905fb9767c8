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
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.contract.claims import Holder
from paceline.contract.files import find_own_folder, make_own_folder, open_own_file
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import QueryStates, read_records, record_maker
from paceline.watch.run_status import LOST
from paceline.watch.scheduler import query_states

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


# seconds without a change until a run that is over counts as unchanging: file servers show it late
SETTLED = 120.0
# the same for a job that Slurm does not know: its controller may have been away
FORGOTTEN = 86400.0
FEW = 100  # runs that are read as quickly as the index


def read_rows(
    folders: Sequence[RunFolder] | Sequence[str], scratch: Path, query: QueryStates = query_states
) -> list[Overview]:
    """Return the rows of these runs, in their order. The scheduler is asked about those that may
    not be over.
    """
    paths = [folder if isinstance(folder, str) else str(folder.path) for folder in folders]
    if len(paths) < FEW:
        return [make_overview(record) for record in read_records(map(_folder, paths), query)]
    index = load_index(scratch)
    kept: dict[str, Overview] = {}
    for path in paths:
        entry = index.get(path)
        if entry is not None and entry.stamp == _stamp(path, entry.job_start):
            kept[path] = entry.row
    missing = [_folder(path) for path in paths if path not in kept]
    make_record = record_maker(missing, query)
    records = [make_record(folder) for folder in missing]
    rows = [(record.holder, make_overview(record)) for record in records]
    read = {row.path: row for _, row in rows}
    added = dict(_settled(rows))
    gone = [
        path
        for path in index
        if path not in kept and path not in added and not os.path.lexists(path)
    ]
    if added or gone:
        for path in gone:
            del index[path]
        save_index(scratch, index | added)
    return [kept.get(path) or read[path] for path in paths]


def _folder(path: str) -> RunFolder:
    return RunFolder(Path(path))


def _settled(rows: Iterable[tuple[Holder | None, Overview]]) -> Iterable[tuple[str, Entry]]:
    """Yield entries for runs that are over, and whose folders have not changed for a while."""
    now = time.time()
    for holder, row in rows:
        if not row.is_over:
            continue
        job_start = holder.name if holder else ""
        stamp = _stamp(row.path, job_start)
        changed = max(max(stamp) / 1e9, row.updated or 0.0)
        if now - changed > (FORGOTTEN if row.status == LOST and row.job else SETTLED):
            yield row.path, Entry(stamp, job_start, [getattr(row, name) for name in FIELDS])


def _stamp(path: str, job_start: str) -> tuple[int, ...]:
    """Return when the run folder, its claims and its newest job start last changed.

    A run that starts again is claimed. One that is cancelled or submitted again, or gets a verdict,
    has a new file.
    """
    return changed(path), changed(f"{path}/claims"), changed(f"{path}/job-starts/{job_start}")


def changed(path: Path | str) -> int:
    """Return when a file or folder last changed, in nanoseconds since 1970; 0 if it is missing."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
