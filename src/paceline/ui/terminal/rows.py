"""The rows of the table: live runs first, and the trials of a sweep in one row that unfolds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from paceline.sweep.overview import SweepOverview
from paceline.watch.overview import Overview

WAITING = frozenset({"queued", "held", "starting", "prepared"})
MAX_ROWS = 2000
NO_POINTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Row:
    """A run, or a sweep with its trials."""

    key: str  # the path of the run's or the sweep's folder
    run: Overview | None
    sweep: SweepOverview | None = None
    trials: tuple[Overview, ...] = field(default=(), repr=False)  # those that have started
    is_trial: bool = False
    is_open: bool = False  # the trials follow
    point: str = ""  # the parameters of a trial

    @property
    def name(self) -> str:
        if self.run is None:
            return self.sweep.name if self.sweep is not None else self.trials[0].sweep
        if self.is_trial:
            return f"trial {self.run.trial}" if self.run.trial is not None else self.run.run_id
        return self.run.name or self.run.program.rpartition("/")[2] or self.run.run_id

    @property
    def created(self) -> float:
        newest = max((each.created or 0.0 for each in self.members), default=0.0)
        return max(newest, (self.sweep.created or 0.0) if self.sweep is not None else 0.0)

    @property
    def liveliness(self) -> int:
        """A number that is smaller the more a row needs looking at."""
        if self.sweep is not None:
            return 2 if self.sweep.is_over else 1 if self.status in WAITING else 0
        return min((liveliness(each) for each in self.members), default=1)

    @property
    def status(self) -> str:
        if self.run is not None:
            return self.run.status
        # whose folder cannot be read
        return self.sweep.status if self.sweep is not None else "sweep"

    @property
    def is_over(self) -> bool:
        return (
            self.sweep.is_over
            if self.sweep is not None
            else all(each.is_over for each in self.members)
        )

    @property
    def count(self) -> int:
        """How many trials a sweep has."""
        return self.sweep.trials if self.sweep is not None else len(self.trials)

    @property
    def waiting(self) -> int:
        """How many of them are not over."""
        if self.sweep is not None:
            return sum(self.sweep.counts.get(state, 0) for state in ("running", "pending"))
        return sum(not each.is_over for each in self.trials)

    @property
    def counts(self) -> str:
        """How many trials are in which state: `3 running, 40 done`."""
        found = Counter(each.status for each in sorted(self.trials, key=liveliness))
        if self.sweep is not None:
            ordered = sorted(
                self.sweep.counts, key=lambda state: (state != "running", state != "pending")
            )
            found = Counter({state: self.sweep.counts[state] for state in ordered})
        return ", ".join(f"{count} {status}" for status, count in found.items())

    @property
    def members(self) -> tuple[Overview, ...]:
        return (self.run,) if self.run is not None else self.trials


def liveliness(run: Overview) -> int:
    return 2 if run.is_over else 1 if run.status in WAITING else 0


def arrange(
    runs: Iterable[Overview],
    sweeps: Iterable[SweepOverview] = (),
    *,
    unfolded: Collection[str] = (),
    wanted: str = "",
    points: Mapping[str, str] = NO_POINTS,
) -> list[Row]:
    """Return the rows of what matches the filter: running runs, queued ones, then all others, newest first."""
    trials: dict[str, list[Overview]] = {
        sweep.path: []
        for sweep in sweeps
        if _has_words(wanted, (sweep.name, sweep.project, sweep.status, "sweep"))
    }
    rows = []
    for run in runs:
        sweep_path = run.path.rpartition("/trials/")[0] if run.sweep else ""
        if not sweep_path and matches(run, wanted):
            rows.append(Row(run.path, run))
        elif sweep_path in trials or (sweep_path and matches(run, wanted)):
            trials.setdefault(sweep_path, []).append(run)
    known = {sweep.path: sweep for sweep in sweeps}
    for key, found in trials.items():
        ordered = tuple(sorted(found, key=lambda run: run.trial or 0))
        rows.append(Row(key, None, known.get(key), ordered, is_open=key in unfolded))
    rows.sort(key=lambda row: (row.liveliness, -row.created))
    return [each for row in rows[:MAX_ROWS] for each in _with_trials(row, points)]


def _with_trials(row: Row, points: Mapping[str, str]) -> list[Row]:
    if not row.is_open:
        return [row]
    ordered = sorted(row.trials, key=liveliness)
    trials = (Row(run.path, run, is_trial=True, point=points.get(run.path, "")) for run in ordered)
    return [row, *trials]


def matches(run: Overview, wanted: str) -> bool:
    """Return whether a run has all the words of a filter in its names, its status or its job."""
    words = (
        run.run_id,
        run.name,
        run.project,
        run.experiment,
        run.sweep,
        run.program,
        run.status,
        run.job,
        run.detail,
    )
    return _has_words(wanted, words)


def _has_words(wanted: str, words: Iterable[str]) -> bool:
    text = "\n".join(words).lower()
    return all(word in text for word in wanted.lower().split())


def summary(runs: Iterable[Overview]) -> str:
    """Return how many runs are live and how many are over."""
    found = Counter(
        "over" if run.is_over else "queued" if run.status in WAITING else "running" for run in runs
    )
    return " · ".join(
        f"{found[name]} {name}" for name in ("running", "queued", "over") if found[name]
    )
