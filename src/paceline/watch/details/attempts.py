"""The attempts and job starts of a run, and how they ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.contract.verdict import STOPPED, read_verdict
from paceline.watch.failure_text import failure_text, read_failure
from paceline.watch.goodput import Goodput, Span

CANCELLED = "cancelled"  # the status of a run
MAX_TRACEBACK = 20_000  # characters at its end


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None if the launch itself failed."""

    attempt: int
    rank: int | None
    host: str
    text: str
    where: str
    traceback: str


@dataclass(frozen=True)
class AttemptDetails:
    """One try at running the ranks. Times are in seconds since 1970."""

    number: int
    job_start: str
    began: float | None
    ended: float | None  # None while it runs
    verdict: str  # done, stopped, cancelled or failed; empty while it runs, or if it was killed
    failure: Failure | None
    reason: str = ""  # why it was asked to stop, such as its time limit


@dataclass(frozen=True)
class JobStartDetails:
    """One start of a batch job, which may be requeued, or of a local run."""

    name: str
    job: str  # empty for a local run
    nodes: str
    began: float
    ended: float | None  # None for the last one of a run that is not over
    verdict: str


def read_attempts(
    folder: RunFolder,
    goodput: Goodput,
    *,
    is_over: bool,
    status: str,
    events: Iterable[dict[str, Any]] = (),
) -> list[AttemptDetails]:
    """Return all attempts, oldest first. The last one of a run that was cancelled was cancelled,
    too.
    """
    attempts = folder.attempts()
    newest = attempts[-1].number if attempts else 0
    reasons = _stop_reasons(events)
    found = []
    for attempt in attempts:
        spans = [span for span in goodput.timeline if span.attempt == attempt.number]
        runs = not is_over and attempt.number == newest and not read_verdict(attempt.verdict)
        each = _read_attempt(attempt, spans, runs=runs)
        stopped = each.failure is None and each.verdict in ("", STOPPED)
        found.append(replace(each, reason=reasons.get(each.number, "")) if stopped else each)
    if status == CANCELLED and found and found[-1].verdict in ("", STOPPED):
        found[-1] = replace(found[-1], verdict=CANCELLED)
    return found


def _stop_reasons(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return why attempts were asked to stop, as their head agents said: the first request
    counts.
    """
    found: dict[int, str] = {}
    current = 0
    for event in events:
        if event["event"] in ("launch", "ranks"):
            current = max(current, event.get("attempt", 0))
        elif event["event"] == "stop_requested" and isinstance(event.get("by"), str):
            found.setdefault(current, event["by"])
    return found


def _read_attempt(attempt: AttemptFolder, spans: Sequence[Span], *, runs: bool) -> AttemptDetails:
    try:
        job_start = attempt.start.read_text(encoding="utf-8").split()[0]
    except (OSError, ValueError, IndexError):
        job_start = ""
    failure = read_failure(attempt)
    return AttemptDetails(
        number=attempt.number,
        job_start=job_start,
        began=spans[0].began if spans else None,
        ended=spans[-1].ended if spans and not runs else None,
        verdict=read_verdict(attempt.verdict) or "",
        failure=_failure(attempt, failure) if failure else None,
    )


def _failure(attempt: AttemptFolder, failure: dict[str, Any]) -> Failure:
    rank, traceback = failure.get("rank"), ""
    if rank is not None:
        try:
            traceback = str(read_object(attempt.error(rank)).get("traceback", ""))[-MAX_TRACEBACK:]
        except (OSError, ValueError):
            traceback = ""
    host, where = str(failure.get("host", "")), str(failure.get("where", ""))
    return Failure(attempt.number, rank, host, failure_text(failure), where, traceback)


def read_job_starts(
    folder: RunFolder, goodput: Goodput, *, is_over: bool, status: str
) -> list[JobStartDetails]:
    """Return all job starts whose agents have arrived, oldest first."""
    found = []
    for start in goodput.job_starts:
        is_newest = start is goodput.job_starts[-1]
        # The name is from an event, which may be anybody's: it must not be a path.
        known = start.name and "/" not in start.name and start.name not in (".", "..")
        verdict = read_verdict(folder.job_start(start.name).verdict) if known else None
        job = "" if start.name.startswith("pid-") else start.name.rpartition("-")[0]
        ended = None if is_newest and not is_over else start.ended
        if is_newest and status == CANCELLED and verdict in (None, STOPPED):
            verdict = CANCELLED
        found.append(
            JobStartDetails(start.name, job, start.nodes, start.began, ended, verdict or "")
        )
    return found
