"""The rows of the table: live runs first, and the trials of a sweep in one row that unfolds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from paceline.sweep.overview import SweepOverview
from paceline.watch.overview import Overview

WAITING = frozenset({"queued", "held", "starting", "prepared"})
MAX_ROWS = 2000


@dataclass(frozen=True)
class Row:
    """A run, or a sweep with its trials."""

    key: str  # the path of the run's or the sweep's folder
    run: Overview | None
    sweep: SweepOverview | None = None
    trials: tuple[Overview, ...] = field(default=(), repr=False)  # those that have started
    is_trial: bool = False
    is_open: bool = False  # the trials follow

    @property
    def name(self) -> str:
        if self.sweep is not None:
            return self.sweep.name
        assert self.run is not None
        if self.is_trial:
            return f"trial {self.run.trial}" if self.run.trial is not None else self.run.run_id
        return self.run.name or self.run.program.rpartition("/")[2] or self.run.run_id

    @property
    def created(self) -> float:
        known = [each.created or 0.0 for each in (self.run, self.sweep, *self.trials) if each]
        return max(known)

    @property
    def liveliness(self) -> int:
        """A number that is smaller the more a row needs looking at."""
        return 2 if self.is_over else 1 if self.status in WAITING else 0

    @property
    def status(self) -> str:
        return self._overview.status

    @property
    def is_over(self) -> bool:
        return self._overview.is_over

    @property
    def _overview(self) -> Overview | SweepOverview:
        overview = self.run or self.sweep
        assert overview is not None
        return overview

    @property
    def counts(self) -> str:
        """How many trials are in which state: `3 running, 40 done`."""
        assert self.sweep is not None
        found = self.sweep.counts
        ordered = sorted(found, key=lambda state: (state != "running", state != "pending"))
        return ", ".join(f"{found[state]} {state}" for state in ordered)


def liveliness(run: Overview) -> int:
    return 2 if run.is_over else 1 if run.status in WAITING else 0


def arrange(
    runs: Iterable[Overview],
    sweeps: Iterable[SweepOverview] = (),
    *,
    unfolded: Collection[str] = (),
    wanted: str = "",
) -> list[Row]:
    """Return the rows of what matches the filter: running runs, queued ones, then all others, newest first."""
    known = {sweep.path: sweep for sweep in sweeps}
    trials: dict[str, list[Overview]] = {
        path: []
        for path, sweep in known.items()
        if _has_words(wanted, (sweep.name, sweep.project, sweep.status, "sweep"))
    }
    rows = []
    for run in runs:
        sweep_path = run.path.rpartition("/trials/")[0] if run.sweep else ""
        if sweep_path in trials or (sweep_path in known and matches(run, wanted)):
            trials.setdefault(sweep_path, []).append(run)
        elif sweep_path not in known and matches(run, wanted):
            rows.append(Row(run.path, run))
    for key, found in trials.items():
        ordered = tuple(sorted(found, key=lambda run: run.trial or 0))
        rows.append(Row(key, None, known[key], ordered, is_open=key in unfolded))
    rows.sort(key=lambda row: (row.liveliness, -row.created))
    listed = []
    for row in rows[:MAX_ROWS]:
        trials_of = sorted(row.trials, key=liveliness) if row.is_open else []
        listed += [row, *(Row(run.path, run, is_trial=True) for run in trials_of)]
    return listed


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
