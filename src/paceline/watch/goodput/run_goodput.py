"""The goodput of a run folder: its events and, where events are missing, what other files show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.contract.files.foreign_records import read_tail
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.watch import origin
from paceline.watch.goodput.events import ENDS, QUEUED, find_end
from paceline.watch.goodput.goodput import Goodput, compute_goodput
from paceline.watch.rank_samples import read_first_rank

TAIL = 16384  # bytes of the list of requeues

Event = dict[str, Any]


def read_goodput(
    folder: RunFolder, events: Sequence[Event], *, is_over: bool, is_waiting: bool = False
) -> Goodput:
    """Return where the time of a run went so far. `is_waiting`: Slurm has its job in the queue."""
    is_waiting = not is_over and (is_waiting or _is_requeued(folder, events))
    more = [
        *_signs_of_life(folder, events, is_waiting=is_waiting),
        *(() if is_over else _progress(folder)),
    ]
    known = sorted([*events, *more], key=lambda event: float(event["time"]))
    if is_waiting and _newest_start(known):  # nothing that its last start did is later
        known.append({"time": known[-1]["time"], "event": "requeued"})
    return compute_goodput(known, find_end(folder, events) if is_over else origin.now())


def _newest_start(events: Sequence[Event]) -> Event:
    """Return the arrival of the newest head agent; empty if there is none, or if the run was
    submitted again since.
    """
    for event in reversed(events):
        if event["event"] in QUEUED:
            return {}
        if event["event"] == "node" and event.get("index", 0) == 0:
            return event
    return {}


def _is_requeued(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Return whether the newest start of a job has ended with a requeue. Each line of the file is
    `TIME JOB-START`.
    """
    try:
        lines = read_tail(folder.requeues, TAIL).decode(errors="replace").split("\n")
    except OSError:
        return False
    names = [line.partition(" ")[2].strip() for line in lines]
    return any(names) and [name for name in names if name][-1] == _newest_start(events).get(
        "job_start"
    )


def _signs_of_life(
    folder: RunFolder, events: Sequence[Event], *, is_waiting: bool
) -> Iterator[Event]:
    """Yield when the ranks of an attempt last wrote to their logs, if it was killed and could not
    write its end.
    """
    launches = [
        event for event in events if event["event"] in ("launch", "ranks") and "attempt" in event
    ]
    started, ended = (
        {event["attempt"] for event in launches},
        {event.get("attempt") for event in events if event["event"] in ENDS},
    )
    newest = max(launches, key=lambda event: event["attempt"], default=None)
    start = _newest_start(events)
    if newest is not None and not is_waiting and start.get("time", 0.0) <= newest["time"]:
        ended.add(newest["attempt"])  # it may still run
    for number in sorted(started - ended):
        if times := _log_times(folder.attempt(number)):
            yield {"time": max(times), "event": "alive", "attempt": number}


def last_output(folder: RunFolder) -> float:
    """Return when a rank of the newest attempt last printed something; 0 if none has."""
    return max(
        (time for attempt in folder.attempts()[-1:] for time in _log_times(attempt)), default=0.0
    )


def _log_times(attempt: AttemptFolder) -> list[float]:
    try:
        with os.scandir(attempt.path) as entries:
            return [entry.stat().st_mtime for entry in entries if entry.name.endswith(".log")]
    except OSError:
        return []


def _progress(folder: RunFolder) -> Iterator[Event]:
    """Yield how far rank 0 of a live run is, and how long it has waited for data, as its agent saw
    it last.
    """
    sample = read_first_rank(folder)
    if sample is not None:
        yield {
            "time": sample.time,
            "event": "progress",
            "step": sample.step,
            "waited": sample.waited,
        }
