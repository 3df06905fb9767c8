"""Read the rows of runs. Those that are over hardly change: a few times of last change tell
whether one has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.contract.claims import Holder
from paceline.contract.run_folder import RunFolder
from paceline.watch.index.index_file import FIELDS, Entry, load_index, save_index
from paceline.watch.index.parallel import read_in_processes
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import LOST, QueryStates, iterate_records, record_maker
from paceline.watch.scheduler.shared_answer import query_states

# seconds without a change until a run that is over counts as unchanging: file servers show it late
SETTLED = 120.0
# the same for a job that Slurm does not know: its controller may have been away
FORGOTTEN = 86400.0
FEW = 100  # runs that are read as quickly as the index
MANY = 1000  # runs that are read sooner by several processes


def read_rows(
    folders: Sequence[RunFolder] | Sequence[str],
    scratch: Path,
    query: QueryStates = query_states,
    processes: int = 1,
) -> list[Overview]:
    """Return the rows of these runs, in their order. The scheduler is asked about those that may
    not be over.

    Where thousands of runs are not in the index, several processes read them. Only a process
    without threads may ask for that: they are forked.
    """
    paths = [folder if isinstance(folder, str) else str(folder.path) for folder in folders]
    if len(paths) < FEW:
        return [make_overview(record) for record in iterate_records(map(_folder, paths), query)]
    index = load_index(scratch)
    kept: dict[str, Overview] = {}
    for path in paths:
        entry = index.get(path)
        if entry is not None and entry.stamp == _stamp(path, entry.job_start):
            kept[path] = entry.row
    missing = [_folder(path) for path in paths if path not in kept]
    rows = read_in_processes(
        missing, record_maker(missing, query), processes if len(missing) >= MANY else 1
    )
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
    return _changed(path), _changed(f"{path}/claims"), _changed(f"{path}/job-starts/{job_start}")


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
