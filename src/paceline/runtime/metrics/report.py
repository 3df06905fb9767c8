"""A trial's scores: recorded in the run folder, and compared with other trials of the sweep. Needs
no torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.jsonl import LineWriter
from paceline.contract.pruning import Pruner
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import SweepFolder, TrialFolder, is_number, read_lines
from paceline.errors import UsageError
from paceline.runtime.console import note


class TrialReporter:
    """Records scores and asks the pruner, on rank 0. The other ranks learn the outcome from it."""

    def __init__(self, folder: Path | None, *, trial: dict[str, Any], rank: int) -> None:
        self.metric: str | None = trial.get("metric")
        # Whether the ranks must agree at each report. The launch spec is the same for all of them.
        self.can_prune = trial.get("prune", "none") != "none"
        self._trial = trial
        self._folder = TrialFolder(folder) if folder is not None and rank == 0 else None
        self._lines = LineWriter(self._folder.reports if self._folder else None)
        self._seen: set[Any] = set()  # steps with a report
        self._pruner: Pruner | None = None
        self._broken = False  # the pruner failed, and is not asked again
        # An attempt that failed while its ranks left: the pruner decides once, and would let this
        # one continue.
        self._is_pruned = (
            self._folder is not None and self.can_prune and self._folder.pruned.exists()
        )
        if self._folder is not None and self.can_prune:
            for line in read_lines(self._folder.reports):  # from earlier attempts
                if is_number(line.get("value")):
                    self._seen.add(line.get("step"))

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
        if self._is_pruned:
            return True
        if not self.can_prune or self._broken or number - number != 0 or step in self._seen:
            return False  # a step that is reported again after a restart was judged before
        self._seen.add(step)
        try:
            if self._pruner is None:
                sweep = SweepFolder(Path(self._trial["sweep"]))
                self._pruner = Pruner(sweep, self._trial["number"])
            prune = self._pruner.should_prune(len(self._seen))
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
