"""One row per run: what `paceline ps`, `paceline top` and the list of runs in the browser show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.runs.folder import TRIALS
from paceline.cluster.slurm.states import WAITING
from paceline.contract.files.foreign_records import parse_object, read_tail
from paceline.watch.goodput import compute_goodput, find_end, read_events
from paceline.watch.records import Record

TAIL = 16384  # bytes at the end of a metrics file
RATES = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
LOSSES = ("loss", "train_loss", "train/loss")  # the first that a run logs; else any name with "loss" in it


@dataclass(frozen=True)
class Overview:
    """A run in one row. Times are in seconds since 1970; what is not known is None or empty."""

    run_id: str
    name: str
    project: str
    experiment: str
    sweep: str  # the sweep that it is a trial of
    trial: int | None
    program: str
    path: str
    status: str
    is_over: bool
    job: str
    nodes: int
    nproc: int
    attempts: int
    created: float | None
    updated: float | None  # when it last logged
    step: int | None
    total_steps: int | None
    seconds_left: float | None
    loss: float | None
    loss_name: str
    rate: float | None
    rate_unit: str  # samples/s, tokens/s or steps/s
    goodput: float | None  # the share of its time that went into steps that count
    starts: float | None  # when a job that waits is expected to start
    detail: str  # why it waits, where it runs or why it ended, in plain words
    hint: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_overview(record: Record) -> Overview:
    """Return the row of a run. Reads the end of its metrics and its events, whatever their length."""
    details, folder = record.details, record.folder
    last = _last_line(folder.metrics)
    loss_name = _loss_name(last)
    rate, unit = _rate(last)
    is_trial = folder.path.parent.name == TRIALS
    return Overview(
        run_id=record.run_id,
        name=str(details.get("name", "")),
        project=str(details.get("project", "")),
        experiment=str(details.get("experiment", "")),
        sweep=folder.path.parent.parent.name if is_trial else "",
        trial=int(folder.path.name) if is_trial and folder.path.name.isdigit() else None,
        program=str(details.get("program", "")),
        path=str(folder.path),
        status=record.status,
        is_over=record.is_over,
        job=record.job or "",
        nodes=int(details.get("nodes") or 1),
        nproc=int(details.get("nproc") or 1),
        attempts=record.attempts,
        created=details.get("created"),
        updated=_number(last.get("time")),
        step=record.step,
        total_steps=None,
        seconds_left=None,
        loss=_number(last.get(loss_name)),
        loss_name=loss_name,
        rate=rate,
        rate_unit=unit,
        goodput=_goodput(record),
        starts=_starts(record),
        detail=record.detail,
        hint=record.hint,
    )


def make_overviews(records: Iterable[Record]) -> list[Overview]:
    return [make_overview(record) for record in records]


def _last_line(metrics: Path) -> dict[str, Any]:
    """Return the newest value of each number in the end of a metrics file."""
    found: dict[str, Any] = {}
    with suppress(OSError):
        for line in read_tail(metrics, TAIL).splitlines():
            with suppress(ValueError):
                found |= parse_object(line)
    return found


def _loss_name(last: Mapping[str, Any]) -> str:
    known = [name for name in LOSSES if name in last]
    known += [name for name in last if "loss" in name.lower()]
    return known[0] if known else ""


def _rate(last: Mapping[str, Any]) -> tuple[float | None, str]:
    for name, unit in RATES.items():
        if (rate := _number(last.get(name))) is not None:
            return rate, unit
    seconds = _number(last.get("seconds"))
    return (1 / seconds, "steps/s") if seconds else (None, "")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _goodput(record: Record) -> float | None:
    events = read_events(record.folder.events)
    shares = compute_goodput(events, find_end(record.folder, events) if record.is_over else time.time())
    return shares.share("training") if shares.total > 0 else None


def _starts(record: Record) -> float | None:
    if record.state is None or record.state.phase != WAITING:
        return None
    with suppress(ValueError):
        return time.mktime(time.strptime(record.state.start, "%Y-%m-%dT%H:%M:%S"))
    return None
