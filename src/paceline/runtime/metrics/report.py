"""How good a run is so far, as its script says: kept in the run folder, and held against other trials of a sweep.

No torch: a script that does not use a session may report too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.jsonl import LineWriter
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import SweepFolder, TrialFolder, read_lines
from paceline.errors import UsageError


class TrialReporter:
    """Rank 0 writes, and asks the pruner; all others only hear what came of it."""

    def __init__(self, folder: Path | None, *, trial: dict[str, Any], rank: int) -> None:
        self.metric: str | None = trial.get("metric")
        # Whether ranks have something to agree on at each report. The order says it to all of them alike.
        self.can_prune = trial.get("prune", "none") != "none" and trial.get("optuna") is not None
        self._trial = trial
        self._folder = TrialFolder(folder) if folder is not None and rank == 0 else None
        self._lines = LineWriter(self._folder.reports if self._folder else None)
        self._seen: dict[Any, int] = {}  # step -> which report that was
        self._pruner: Any = None
        self._broken = False  # no more is asked; peers are told as before
        # An attempt that failed while its ranks left: the pruner decides once, and would let this one continue.
        self._is_pruned = self._folder is not None and self.can_prune and self._folder.pruned.exists()
        if self._folder is not None and self.can_prune:
            for line in read_lines(self._folder.reports):  # of attempts before this one
                self._count(line.get("step"))

    def _count(self, step: Any) -> int:
        return self._seen.setdefault(step, len(self._seen) + 1)

    def chosen(self, value: Any, named: dict[str, Any]) -> Any:
        """The one number that counts: what was given alone, or under the name of the sweep's metric."""
        if (value is None) == (not named):
            raise UsageError(
                "run.report takes one number", hint="run.report(loss), or run.report(loss=loss)."
            )
        if value is not None:
            return value
        if self.metric is not None and self.metric in named:
            return named[self.metric]
        if self.metric is not None or len(named) > 1:
            known = (
                f"the sweep's metric is {self.metric!r}" if self.metric else "which one counts is not known"
            )
            raise UsageError(
                f"run.report({', '.join(f'{name}=...' for name in named)}): {known}", hint="Report that one."
            )
        return next(iter(named.values()))

    def add(self, value: Any, step: int) -> bool:
        """Write a report down. True where the trial is not worth going on; always False on ranks other than 0."""
        if self._folder is None:
            return False
        number = float(value)
        line = {"step": step, "value": number if number - number == 0 else str(number), "time": time.time()}
        self._lines.append(json.dumps(line) + "\n")
        if self._is_pruned:
            return True
        if not self.can_prune or self._broken or number - number != 0:
            return False
        try:
            if self._pruner is None:
                from paceline.contract.optuna_study import Pruner

                sweep = SweepFolder(Path(self._trial["sweep"]))
                self._pruner = Pruner(sweep, sweep.read_search(), self._trial["optuna"])
            pruned: bool = self._pruner.should_prune(number, self._count(step))
        except Exception as problem:  # of Optuna's or of the disk's: the trial is worth more than its pruning
            print(f"paceline: this trial is not pruned: {problem}", file=sys.stderr, flush=True)
            self._broken = True
            return False
        if pruned:
            write_atomically(self._folder.pruned, f"step {step}\n")
        return pruned

    def close(self) -> None:
        self._lines.close()


def report(value: float, *, step: int = 0) -> None:
    """Say how good the run is, from a script that opens no session: the last word is a sweep's value of it.

    Only rank 0's word is written. Outside of runs that Paceline has started it does nothing.
    """
    folder = os.environ.get(env.RUN)
    if folder and os.environ.get(env.RANK, "0") == "0":
        reports = TrialReporter(Path(folder), trial={}, rank=0)
        reports.add(value, step)
        reports.close()
