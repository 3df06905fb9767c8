"""The sums of a run's time line. `division` says what counts as which part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.watch.goodput.division import PARTS, SHARES, Span, divide
from paceline.watch.goodput.periods import JobStart, PeriodReader

MAX_SPANS = 1000  # of a time line
WITH_RANKS = ("starting", "running", "training", "saving", "lost")


@dataclass
class Goodput:
    """Seconds per category, in all and by part; `total` is the run's wall time so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    parts: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: dict.fromkeys(parts, 0.0) for name, parts in PARTS.items()}
    )
    attempts: int = 0
    failures: int = 0
    timeline: list[Span] = field(default_factory=list)
    job_starts: list[JobStart] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def seconds_between_failures(self) -> float | None:
        """The mean time that the run had nodes, per failure; None without one."""
        return (
            sum(self.seconds[name] for name in WITH_RANKS) / self.failures
            if self.failures
            else None
        )

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0


def compute_goodput(events: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Divide a run's wall time into categories, until `now`, if its last event is not its end.

    For a run that is still active, that is the current time; for others, see `find_end`.
    """
    reader = PeriodReader()
    reader.read(events, now)
    result = Goodput(
        attempts=len(reader.attempts), failures=reader.failures, job_starts=reader.job_starts
    )
    for piece in divide(reader.periods):
        for span in piece.spans:
            result.seconds[span.kind] += span.seconds
            result.timeline.append(span)
        for name, parts in piece.parts.items():
            for part, seconds in parts.items():
                result.parts[name][part] += seconds
    result.timeline = _join(result.timeline)
    return result


def _join(spans: Iterable[Span]) -> list[Span]:
    """Return a time line with at most about `MAX_SPANS` spans: neighbours of a kind become one,
    short saves go.
    """
    joined = _join_neighbours(span for span in spans if span.ended > span.began)
    if len(joined) <= MAX_SPANS:
        return joined
    shortest = (joined[-1].ended - joined[0].began) / MAX_SPANS
    kept: list[Span] = []
    for span in joined:
        touches = kept and kept[-1].ended == span.began and kept[-1].attempt == span.attempt
        if touches and span.kind == "saving" and span.seconds < shortest:
            kept[-1] = Span(kept[-1].kind, kept[-1].began, span.ended, span.attempt)
        else:
            kept.append(span)
    return _join_neighbours(kept)


def _join_neighbours(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and (joined[-1].kind, joined[-1].attempt, joined[-1].ended) == (
            span.kind,
            span.attempt,
            span.began,
        ):
            joined[-1] = Span(span.kind, joined[-1].began, span.ended, span.attempt)
        else:
            joined.append(span)
    return joined
