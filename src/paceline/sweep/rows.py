"""The rows of a sweep's table: trials in order, best first or by any column. Trials of one point
with different seeds share a row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.contract.sweep_folder import DONE, FAILED, PRUNED
from paceline.errors import UsageError
from paceline.sweep.results import MISSING, PENDING, RUNNING, Sweep, Trial

# The state of a point with repeats is the first of these that one of them has.
COLUMNS = ("value", "number", "state", "seconds")
_PRECEDENCE = (RUNNING, PENDING, MISSING, FAILED, PRUNED, DONE)


@dataclass(frozen=True)
class Row:
    """One point: a trial, or its trials with several seeds."""

    trials: tuple[Trial, ...]
    # for repeats, the mean over those that are done; of a pruned point over all
    value: float | None
    deviation: float | None  # sample standard deviation; None for fewer than two
    count: int  # values in the mean

    @property
    def number(self) -> int:
        return self.trials[0].number

    @property
    def point(self) -> dict[str, Any]:
        return self.trials[0].point

    @property
    def state(self) -> str:
        return next(
            state for state in _PRECEDENCE if any(trial.state == state for trial in self.trials)
        )

    @property
    def counts(self) -> bool:
        """Whether its value ranks it: a single trial's once it is done, a mean from the first
        repeat on.
        """
        return (
            self.value is not None
            and not self.is_pruned
            and (self.state == DONE or len(self.trials) > 1)
        )

    @property
    def is_pruned(self) -> bool:
        return any(trial.state == PRUNED for trial in self.trials)

    @property
    def status(self) -> str:
        """The state; if repeats differ, how many are in each."""
        counted = Counter(trial.state for trial in self.trials)
        return (
            self.state
            if len(counted) == 1
            else ", ".join(f"{n} {state}" for state, n in counted.most_common())
        )

    @property
    def seconds(self) -> float | None:
        known = [trial.seconds for trial in self.trials if trial.seconds is not None]
        return statistics.fmean(known) if known else None


def has_repeats(sweep: Sweep) -> bool:
    return len({trial.group for trial in sweep.trials}) < len(sweep.trials)


def rows(sweep: Sweep) -> list[Row]:
    """Return a row for each point, by number."""
    if not has_repeats(sweep):
        return [
            Row((trial,), trial.value, None, int(trial.value is not None)) for trial in sweep.trials
        ]
    together: dict[int, list[Trial]] = {}
    for trial in sweep.trials:
        together.setdefault(trial.group, []).append(trial)
    return [_repeats(trials) for trials in together.values()]


def _repeats(trials: list[Trial]) -> Row:
    pruned = any(trial.state == PRUNED for trial in trials)  # by the mean of all: show that
    values = [
        trial.value
        for trial in trials
        if (pruned or trial.state == DONE) and trial.value is not None
    ]
    return Row(
        tuple(trials),
        value=statistics.fmean(values) if values else None,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        count=len(values),
    )


def value_text(row: Row, digits: int = 5) -> str:
    """Return a row's value; for repeats, the mean, the deviation and their number."""
    if row.value is None:
        return ""
    if len(row.trials) == 1:
        return f"{row.value:.{digits}g}"
    spread = f" ± {row.deviation:.2g}" if row.deviation is not None else ""
    return f"{row.value:.{digits}g}{spread} (n={row.count})"


def best_first(sweep: Sweep, listed: Iterable[Row]) -> list[Row]:
    """Sort rows: done by value, then running, pruned, failed, missing and pending."""
    order = {DONE: 0, RUNNING: 1, PRUNED: 2, FAILED: 3, MISSING: 4, PENDING: 5}
    sign = -1.0 if sweep.maximizes else 1.0

    def position(row: Row) -> tuple[int, float, int]:
        first = order[DONE] if row.counts else order[PRUNED if row.is_pruned else row.state]
        return first, float("inf") if row.value is None else sign * row.value, row.number

    return sorted(listed, key=position)


def sort_by(sweep: Sweep, listed: Iterable[Row], key: str) -> list[Row]:
    """Sort by `value` (best first), `number`, `state`, `seconds` or a parameter; `-key`
    reverses.
    """
    name, backwards = key.removeprefix("-"), key.startswith("-")
    name = "value" if name == sweep.metric else name
    if name not in (*COLUMNS, *sweep.keys):
        raise UsageError(
            f"Invalid --sort {key}: the sweep {sweep.name} has no column {name!r}.",
            hint=f"The columns are: {', '.join([*COLUMNS, *sweep.keys])}",
        )

    def cell(row: Row) -> object:
        return row.point.get(name) if name in sweep.keys else getattr(row, name)

    found = best_first(sweep, listed)
    if name != "value":
        found.sort(key=lambda row: (comparable(cell(row)), row.number))
    elif not backwards:
        return found
    known = [row for row in found if cell(row) is not None]
    without = [row for row in found if cell(row) is None]  # last in either direction
    return [*(reversed(known) if backwards else known), *without]


def comparable(value: object) -> tuple[int, float, str]:
    """Sort key: numbers by size, then the rest as text."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def to_label(value: object) -> str:
    """Return a value as a short label, the same for equal numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
