"""The order of a sweep's trials: best first, or by any column; repeats of a point as one row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.contract.sweep_folder import DONE, FAILED, PRUNED
from paceline.errors import UsageError
from paceline.sweep.results import MISSING, PENDING, RUNNING, Sweep, Trial

# Of the repeats of a point, the state that says most about what is still to be done.
_TELLING = (RUNNING, PENDING, MISSING, FAILED, PRUNED, DONE)


@dataclass(frozen=True)
class Row:
    """One point: a trial, or its repeats with several seeds."""

    trials: tuple[Trial, ...]
    value: float | None  # the mean over those that were run to their end, where there are repeats
    deviation: float | None  # the sample's standard deviation; None with fewer than two
    count: int  # how many values the mean is of

    @property
    def number(self) -> int:
        return self.trials[0].number

    @property
    def point(self) -> dict[str, Any]:
        return self.trials[0].point

    @property
    def state(self) -> str:
        return next(state for state in _TELLING if any(trial.state == state for trial in self.trials))

    @property
    def told(self) -> str:
        """The state in words: of repeats that differ, how many are in each."""
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
    """A row for each point, in the order of their numbers."""
    if not has_repeats(sweep):
        return [Row((trial,), trial.value, None, int(trial.value is not None)) for trial in sweep.trials]
    together: dict[int, list[Trial]] = {}
    for trial in sweep.trials:
        together.setdefault(trial.group, []).append(trial)
    return [_repeats(trials) for trials in together.values()]


def _repeats(trials: list[Trial]) -> Row:
    values = [trial.value for trial in trials if trial.state == DONE and trial.value is not None]
    return Row(
        tuple(trials),
        value=statistics.fmean(values) if values else None,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        count=len(values),
    )


def best_first(sweep: Sweep, listed: Iterable[Row]) -> list[Row]:
    """Those that ended well by their value, then what runs, was pruned, failed, waits."""
    places = {DONE: 0, RUNNING: 1, PRUNED: 2, FAILED: 3, MISSING: 4, PENDING: 5}
    sign = -1.0 if sweep.maximizes else 1.0

    def place(row: Row) -> tuple[int, float, int]:
        # A mean counts from the first repeat that has ended; the value of one trial counts when that has.
        counts = row.value is not None and (row.state == DONE or len(row.trials) > 1)
        standing = places[DONE] if counts else places[row.state]
        return standing, float("inf") if row.value is None else sign * row.value, row.number

    return sorted(listed, key=place)


def sort_by(sweep: Sweep, listed: Iterable[Row], key: str) -> list[Row]:
    """By a column: `value` (best first), `number`, `state`, `seconds`, or a parameter; `-key` the other way round."""
    name, backwards = key.removeprefix("-"), key.startswith("-")
    if name in ("value", sweep.metric):
        found = best_first(sweep, listed)
        return _backwards(found) if backwards else found
    own = {
        "number": lambda row: row.number,
        "state": lambda row: row.state,
        "seconds": lambda row: row.seconds,
    }
    if name in sweep.keys:
        pick: Any = lambda row: row.point.get(name)  # noqa: E731
    elif name in own:
        pick = own[name]
    else:
        raise UsageError(
            f"--sort {key}: the sweep {sweep.name} has no column {name!r}",
            hint=f"its columns are: {', '.join(['value', *own, *sweep.keys])}",
        )
    known = sorted((row for row in listed if pick(row) is not None), key=lambda row: _comparable(pick(row)))
    without = [row for row in listed if pick(row) is None]  # last, whichever way
    return [*(reversed(known) if backwards else known), *without]


def _backwards(found: list[Row]) -> list[Row]:
    with_value = [row for row in found if row.value is not None]
    return [*reversed(with_value), *(row for row in found if row.value is None)]


def _comparable(value: object) -> tuple[int, float, str]:
    """Numbers by size, then the rest as text."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)
