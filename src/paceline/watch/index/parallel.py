"""Read many runs with several processes: it is the parsing of small files that takes the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from paceline.contract.claims import Holder
from paceline.contract.run_folder import RunFolder
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record

MOST = 4  # processes: a login node is shared
CHUNK = 100  # runs that a process reads at a time

MakeRecord = Callable[[RunFolder], Record]
Row = tuple[Holder | None, Overview]


def spare_processes() -> int:
    """Return how many processes a command may use for a moment."""
    return min(MOST, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1


def read_in_processes(
    folders: Sequence[RunFolder], make_record: MakeRecord, processes: int
) -> list[Row]:
    """Return the row of each run, and who has its folder, in the same order."""
    if processes < 2:
        return [_read(folder, make_record) for folder in folders]
    import multiprocessing

    # Forked processes have what `make_record` knows, so nothing is asked twice.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, _begin, (make_record,)) as pool:
        return pool.map(_read_here, folders, CHUNK)


def _begin(make_record: MakeRecord) -> None:
    global _make_record
    _make_record = make_record
    # Ctrl-C is for the command, which then ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever a handler of the command would do


def _read_here(folder: RunFolder) -> Row:
    return _read(folder, _make_record)


def _read(folder: RunFolder, make_record: MakeRecord) -> Row:
    record = make_record(folder)
    return record.holder, make_overview(record)


_make_record: MakeRecord
