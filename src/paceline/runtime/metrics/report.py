"""A trial's scores: recorded in the run folder, and compared with other trials of the sweep, so
that bad ones end early. Needs no torch.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.foreign_records import LineWriter, read_fields
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import DONE, SweepFolder, TrialFolder, is_number, read_lines
from paceline.errors import UsageError
from paceline.runtime.console import note

REDUCTION_FACTOR = 3  # one in this many points continues at each rung of successive halving
STARTUP_POINTS = 4  # that have finished before the median counts


class TrialReporter:
    """Records scores and asks the pruner, on rank 0. The other ranks learn the outcome from it."""

    def __init__(self, folder: Path | None, *, trial: dict[str, Any], rank: int) -> None:
        self.metric: str | None = trial.get("metric")
        # Whether the ranks must agree at each report. The launch spec is the same for all of them.
        self.can_prune = trial.get("prune", "none") != "none"
        self._trial = trial
        self._folder = TrialFolder(folder) if folder is not None and rank == 0 else None
        self._lines = LineWriter(self._folder.reports if self._folder else None)
        self._pruner: Pruner | None = None
        self._broken = False  # the pruner failed, and is not asked again

    def select(self, value: Any, named: dict[str, Any]) -> Any:
        """Return the score: the only value, or the one with the name of the sweep's metric."""
        if value is None and self.metric in named:
            return named[self.metric]
        scores = [*named.values()] if value is None else [value, *named.values()]
        if len(scores) != 1 or (named and self.metric is not None):
            takes = f"the sweep's metric is {self.metric!r}" if self.metric else "takes one number"
            raise UsageError(
                f"run.report got {', '.join(named) or 'no number'}, but {takes}.",
                hint=f"Use run.report(value) or run.report({self.metric or 'loss'}=value).",
            )
        return scores[0]

    def record(self, value: Any, step: int) -> bool:
        """Write a score. Returns whether to prune the trial; always False on ranks other than 0."""
        if self._folder is None:
            return False
        number = float(value)
        line = {
            "step": step,
            "value": number if number - number == 0 else str(number),
            "time": time.time(),
        }
        self._lines.append(json.dumps(line) + "\n")
        if not self.can_prune or self._broken or number - number != 0:
            return False
        try:
            if self._pruner is None:
                sweep = SweepFolder(Path(self._trial["sweep"]))
                self._pruner = Pruner(sweep, self._trial["number"])
            prune = self._pruner.should_prune()
        # from the disk: the trial is worth more than its pruning
        except Exception as error:
            note(f"pruning is off for this trial: {error}")
            self._broken = True
            return False
        if prune:
            write_atomically(self._folder.pruned, f"step {step}\n")
        return prune

    def close(self) -> None:
        self._lines.close()


def report(value: float, *, step: int = 0) -> None:
    """Report the score of a trial, from a script that opens no session. The last report is the
    trial's score.

    Only rank 0's value is recorded. Outside of runs that Paceline has started, this does nothing.

    Args:
        value: The score.
        step: The step that it belongs to.
    """
    folder = os.environ.get(env.RUN)
    if folder and os.environ.get("RANK", "0") == "0":
        reporter = TrialReporter(Path(folder), trial={}, rank=0)
        reporter.record(value, step)
        reporter.close()


# -- pruning: by successive halving, or by the median of trials that have finished
#
# A point is judged by the mean of its seeds at the same report, over those that have got there so
# far, and ends with all of them.


class Pruner:
    """Decides about one trial, in its rank 0."""

    def __init__(self, sweep: SweepFolder, number: int) -> None:
        self._sweep, self._number, self._search = sweep, number, sweep.read_search()
        # of trials that have ended: their reports, and whether they are done
        self._ended: dict[int, tuple[dict[int, float], bool]] = {}

    def should_prune(self) -> bool:
        """Return whether to end the trial at its last report; the answer is kept if it is yes."""
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
                count = len(self._read(self._number)[0])
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
