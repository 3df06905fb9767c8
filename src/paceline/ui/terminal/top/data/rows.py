"""The rows of the table: live runs first, and the trials of a sweep in one row that unfolds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from paceline.watch.overview import Overview

WAITING = frozenset({"queued", "held", "starting", "prepared"})
MAX_ROWS = 2000


@dataclass(frozen=True)
class Row:
    """A run, or a sweep with its trials."""

    key: str  # the path of the run's or the sweep's folder
    run: Overview | None
    trials: tuple[Overview, ...] = field(default=(), repr=False)
    is_trial: bool = False
    is_open: bool = False  # the trials follow

    @property
    def name(self) -> str:
        if self.run is None:
            return self.trials[0].sweep
        if self.is_trial:
            return f"trial {self.run.trial}" if self.run.trial is not None else self.run.run_id
        return self.run.name or self.run.program.rpartition("/")[2] or self.run.run_id

    @property
    def is_over(self) -> bool:
        return all(each.is_over for each in self.members)

    @property
    def created(self) -> float:
        return max(each.created or 0.0 for each in self.members)

    @property
    def status(self) -> str:
        """Of a sweep: that of its liveliest trial."""
        return min(self.members, key=liveliness).status

    @property
    def counts(self) -> str:
        """How many trials are in which state: `3 running, 40 done`."""
        found = Counter(each.status for each in sorted(self.members, key=liveliness))
        return ", ".join(f"{count} {status}" for status, count in found.items())

    @property
    def members(self) -> tuple[Overview, ...]:
        return (self.run,) if self.run is not None else self.trials


def liveliness(run: Overview) -> int:
    """Return a number that is smaller the more a run needs looking at."""
    return 2 if run.is_over else 1 if run.status in WAITING else 0


def arrange(runs: Iterable[Overview], *, unfolded: Collection[str] = (), wanted: str = "") -> list[Row]:
    """Return the rows of the runs that match the filter: running ones, queued ones, then all others, newest first."""
    sweeps: dict[str, list[Overview]] = {}
    rows = []
    for run in runs:
        if not matches(run, wanted):
            continue
        if run.sweep:
            sweeps.setdefault(run.path.rpartition("/trials/")[0], []).append(run)
        else:
            rows.append(Row(run.path, run))
    for key, found in sweeps.items():
        trials = tuple(sorted(found, key=lambda run: run.trial or 0))
        rows.append(Row(key, None, trials, is_open=key in unfolded))
    rows.sort(key=lambda row: (min(map(liveliness, row.members)), -row.created))
    return [each for row in rows[:MAX_ROWS] for each in _with_trials(row)]


def _with_trials(row: Row) -> list[Row]:
    if not row.is_open:
        return [row]
    ordered = sorted(row.trials, key=liveliness)
    return [row, *(Row(run.path, run, is_trial=True) for run in ordered)]


def matches(run: Overview, wanted: str) -> bool:
    """Return whether a run has all the words of a filter in its names, its status or its job."""
    words = (
        run.run_id, run.name, run.project, run.experiment, run.sweep, run.program, run.status, run.job, run.detail
    )  # fmt: skip
    text = "\n".join(words).lower()
    return all(word in text for word in wanted.lower().split())


def summary(runs: Iterable[Overview]) -> str:
    """Return how many runs are live and how many are over."""
    found = Counter("over" if run.is_over else "queued" if run.status in WAITING else "running" for run in runs)
    return " · ".join(f"{found[name]} {name}" for name in ("running", "queued", "over") if found[name])
