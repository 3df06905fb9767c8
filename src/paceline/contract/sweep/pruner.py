"""Which points of a sweep to end early: successive halving, or worse than the median.

A point is judged by the mean of its seeds at the same report, over those that have got there so
far, and ends with all of them. Means are shared through Optuna's journal, so that a sweep of
thousands of trials reads one file.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.contract.sweep.folder import Search, SweepFolder, TrialFolder, is_number, read_lines
from paceline.contract.sweep.optuna_study import import_optuna, open_study
from paceline.errors import RunError

REDUCTION_FACTOR = 3  # one in this many points continues at each rung of successive halving
STARTUP_POINTS = 4  # that have finished before the median counts


def seeds_of(sweep: SweepFolder, number: int) -> list[TrialFolder]:
    """Return the other trials of a trial's point."""
    points = [line for line in read_lines(sweep.points) if isinstance(line.get("number"), int)]
    groups = {line["number"]: line.get("group") for line in points}
    return [
        sweep.trial(other)
        for other in groups
        if other != number and groups[other] == groups.get(number)
    ]


def is_point_pruned(seeds: Sequence[TrialFolder]) -> bool:
    return any(trial.pruned.exists() for trial in seeds)


class Pruner:
    """Passes a trial's reports on, and decides. Rank 0 holds one for the whole session."""

    def __init__(self, sweep: SweepFolder, search: Search, *, number: int, known: int) -> None:
        """`known` is the point's number in the study."""
        self._study, self._search, self._known = open_study(sweep, search), search, known
        self._states = import_optuna().trial.TrialState
        trials = self._study.get_trials(deepcopy=False)
        if known >= len(trials):
            raise RunError(
                f"{sweep.journal} has no trial {known}.",
                hint="Check whether the file was replaced.",
            )
        self._trial_id = trials[known]._trial_id
        self._seeds = seeds_of(sweep, number)
        self._sign = -1.0 if search.direction == "maximize" else 1.0

    def should_prune(self, value: float, count: int) -> bool:
        """Report a value and return whether to end the trial. `count` numbers the reports from
        1.
        """
        others = [found[count] for trial in self._seeds if count in (found := read_reports(trial))]
        mean = statistics.fmean([value, *others])
        # Unlike `Trial.report`, this replaces the mean over fewer seeds.
        self._study._storage.set_trial_intermediate_value(self._trial_id, count, mean)
        if is_point_pruned(self._seeds):
            return True
        trials = self._study.get_trials(deepcopy=False)
        own = {
            report: self._sign * each
            for report, each in trials[self._known].intermediate_values.items()
        }
        own = {report: each for report, each in own.items() if report < count} | {
            count: self._sign * mean
        }
        rivals = [
            (
                {report: self._sign * each for report, each in trial.intermediate_values.items()},
                trial.state,
            )
            for trial in trials
            if trial.number != self._known
        ]
        if self._search.prune == "halving":
            return is_halved(own, [values for values, _ in rivals], after=self._search.prune_after)
        finished = [values for values, state in rivals if state == self._states.COMPLETE]
        return is_below_median(own, finished, after=self._search.prune_after)


def read_reports(trial: TrialFolder) -> dict[int, float]:
    """Return the values that a trial has reported, by the number of the report, which is that of
    its step.
    """
    counts: dict[Any, int] = {}
    values: dict[int, float] = {}
    for line in read_lines(trial.reports):
        if is_number(line.get("value")):
            values.setdefault(
                counts.setdefault(line.get("step"), len(counts) + 1), float(line["value"])
            )
    return values


def is_halved(
    own: Mapping[int, float], rivals: Sequence[Mapping[int, float]], *, after: int
) -> bool:
    """Return whether a point ends at its last report: at reports `after`, `3 * after`, ... the best
    third continues.

    Smaller is better. The best point always continues, and nothing waits: a point is compared with
    those that have got there before it (asynchronous successive halving).
    """
    count = max(own)
    rung = after
    while rung < count:
        rung *= REDUCTION_FACTOR
    if rung != count:
        return False
    values = sorted([own[count], *(values[count] for values in rivals if count in values)])
    return own[count] > values[max(0, len(values) // REDUCTION_FACTOR - 1)]


def is_below_median(
    own: Mapping[int, float], finished: Sequence[Mapping[int, float]], *, after: int
) -> bool:
    """Return whether a point's best report so far is worse than the median of finished points at
    its last report.
    """
    count = max(own)
    values = [values[count] for values in finished if count in values]
    if count < after or len(finished) < STARTUP_POINTS or not values:
        return False
    return min(own.values()) > statistics.median(values)
