"""Ends trials early that are worse than others of their sweep: by successive halving, or by the
median of those that have finished.

Rank 0 of a trial compares what the trials have reported (`reports.jsonl`). A point is judged by the
mean of its seeds at the same report, over those that have got there so far, and ends with all of
them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.contract.foreign_records import read_fields
from paceline.contract.sweep_folder import DONE, SweepFolder, TrialFolder, is_number, read_lines

REDUCTION_FACTOR = 3  # one in this many points continues at each rung of successive halving
STARTUP_POINTS = 4  # that have finished before the median counts


class Pruner:
    """Decides about one trial, in its rank 0."""

    def __init__(self, sweep: SweepFolder, number: int) -> None:
        self._sweep, self._number, self._search = sweep, number, sweep.read_search()
        # of trials that have ended: their reports, and whether they are done
        self._ended: dict[int, tuple[dict[int, float], bool]] = {}

    def should_prune(self, count: int) -> bool:
        """Return whether to end the trial at this report, counted from 1, which its folder has."""
        groups: dict[int, list[int]] = {}
        for point in self._sweep.read_points():
            groups.setdefault(point.group, []).append(point.number)
        seeds = next(numbers for numbers in groups.values() if self._number in numbers)
        if any(self._sweep.trial(number).pruned.exists() for number in seeds):
            return True
        started = {int(name) for name in os.listdir(self._sweep.trials) if name.isdigit()}
        own: dict[int, float] = {}
        others, finished = [], []
        for numbers in groups.values():
            trials = [self._read(number) for number in numbers if number in started]
            values = self._mean([reports for reports, _ in trials])
            if numbers is seeds:
                own = {report: value for report, value in values.items() if report <= count}
                continue
            others.append(values)
            if len(trials) == len(numbers) and all(is_done for _, is_done in trials):
                finished.append(values)
        if self._search.prune == "halving":
            return is_halved(own, others, after=self._search.prune_after)
        return is_below_median(own, finished, after=self._search.prune_after)

    def _read(self, number: int) -> tuple[dict[int, float], bool]:
        """Return a trial's reports, and whether it is done."""
        if number in self._ended:
            return self._ended[number]
        trial = self._sweep.trial(number)
        result = read_fields(trial.result)
        found = read_reports(trial), result.get("state") == DONE
        if result:
            self._ended[number] = found
        return found

    def _mean(self, trials: Sequence[Mapping[int, float]]) -> dict[int, float]:
        """Return the mean over a point's trials for each report, so that smaller is better."""
        sign = -1.0 if self._search.direction == "maximize" else 1.0
        return {
            report: sign * statistics.fmean(each[report] for each in trials if report in each)
            for report in sorted({report for each in trials for report in each})
        }


def read_reports(trial: TrialFolder) -> dict[int, float]:
    """Return the values that a trial has reported, by the number of the report, which is that of
    its step.
    """
    numbers: dict[Any, int] = {}
    values: dict[int, float] = {}
    for line in read_lines(trial.reports):
        if is_number(line.get("value")):
            number = numbers.setdefault(line.get("step"), len(numbers) + 1)
            values.setdefault(number, float(line["value"]))
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
