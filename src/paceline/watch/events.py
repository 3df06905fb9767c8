"""The events of a run, in order of time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import NUMBER, Fields, keep_valid, read_objects
from paceline.contract.run_folder import RunFolder

EVENT_FIELDS: Fields = {
    "time": NUMBER,
    "event": str,
    "step": int,
    "steps": int,
    "blocked": NUMBER,
    "job_start": str,
    "attempt": int,
    "processes": int,
    "names": list,
    "waited": NUMBER,
    "seconds": (dict, int, float),
    "index": int,
    "ranks": list,
    "nodelist": str,
    "host": str,
    "queued_at": NUMBER,
}
QUEUED = frozenset({"queued", "submitted"})
PHASES = QUEUED | {"node", "started", "launch", "ranks", "training", "saving"}
ENDS = frozenset({"failed", "stopped", "done"})


def read_events(folder: Path | str) -> list[dict[str, Any]]:
    """Return all writers' events in order of time, skipping lines truncated by a crash."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".jsonl"))
    except OSError:
        return []
    lines = chain.from_iterable(read_objects(f"{folder}/{name}") for name in names)
    found = [keep_valid(line, EVENT_FIELDS) for line in lines]
    return sorted(
        (event for event in found if "time" in event and "event" in event),
        key=lambda event: float(event["time"]),
    )


def had_nothing_left(events: Iterable[dict[str, Any]]) -> bool:
    """Return whether the last start of a run found that all its steps were done already."""
    last = [event["event"] for event in events if event["event"] in ("started", "nothing_left")]
    return last[-1:] == ["nothing_left"]


def had_session(events: Iterable[dict[str, Any]]) -> bool:
    """Return whether a session of the runtime ended well in the last start of a run."""
    last = [event["event"] for event in events if event["event"] in ("started", "session_end")]
    return last[-1:] == ["session_end"]


def find_end(folder: RunFolder, events: Sequence[dict[str, Any]]) -> float | None:
    """Return when a run ended whose end nobody recorded, as far as its files tell: it was
    cancelled, killed or lost.
    """
    phases = [event for event in events if event["event"] in PHASES or event["event"] in ENDS]
    if not phases or phases[-1]["event"] in ENDS:
        return None
    last = float(phases[-1]["time"])
    if phases[-1]["event"] in QUEUED:
        return max(last, newest_change([folder.cancelled]))
    logs = [path for attempt in folder.attempts()[-1:] for path in attempt.path.glob("*.log")]
    return max(last, newest_change([folder.metrics, folder.slurm_log, *logs]))


def newest_change(paths: Iterable[Path]) -> float:
    """Return when the newest of these files or folders was changed; 0 if there is none."""
    newest = 0.0
    for path in paths:
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest
