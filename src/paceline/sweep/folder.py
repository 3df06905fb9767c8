"""The files that `paceline sweep` writes to a sweep's folder: the search, its trials, and their
jobs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from paceline.contract import claims
from paceline.contract.redaction import redact_args
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.sweep_folder import Point, Search, SweepFolder
from paceline.errors import SpecError, UsageError
from paceline.spec.run_path import RunPath
from paceline.spec.user_files import require_own_folder

STARTER = "starter"  # in a submission's folder: the command that starts its trials


class SweepWriter:
    """Writes the folder of a sweep, new or existing."""

    def __init__(self, run_path: RunPath) -> None:
        self.run_path = run_path  # the sweep's folder, where a run's would be
        self.folder = SweepFolder(run_path.folder.path)
        self.points: list[Point] = self.folder.read_points()

    @property
    def is_new(self) -> bool:
        return not self.folder.spec.is_file()

    def check_search(self, search: Search) -> None:
        """Raise if the folder holds a different sweep of this name, or a run, or belongs to
        another user.
        """
        require_own_folder(self.folder.path, "Sweep")
        if self.is_new:
            if self.run_path.folder.run_json.is_file():
                raise UsageError(
                    f"{self.folder.path} is a run, not a sweep.",
                    hint="Give the sweep another name with --name.",
                )
            return
        old = self.folder.read_search()
        keys = [
            "metric",
            "direction",
            "sampler",
            *(["space"] if search.sampler in ("random", "tpe") else []),
        ]
        keys += ["wandb_sweep"] if search.wandb_sweep else []
        for key in keys:
            if getattr(old, key) != getattr(search, key):
                raise SpecError(
                    f"The sweep {search.name!r} already exists with a different {key}: "
                    f"{getattr(old, key)!r}.",
                    hint="Give this one another name with --name, or with name in [sweep].",
                )

    def submission_path(self) -> RunPath:
        """Return the folder of the next submission: the code and the launch spec that its trials
        share.
        """
        taken = [
            int(path.name) for path in self.folder.path.glob("submissions/*") if path.name.isdigit()
        ]
        number = max(taken, default=0) + 1
        return replace(
            self.run_path,
            experiment=f"{self.run_path.experiment}/{self.folder.name}/submissions",
            run_id=str(number),
        )

    def trial_path(self, number: int) -> RunPath:
        return replace(
            self.run_path,
            experiment=f"{self.run_path.experiment}/{self.folder.name}/trials",
            run_id=str(number),
        )

    def add_trials(self, search: Search, new: Sequence[Point]) -> None:
        """Write the search and its new trials. Those that never start are run by the next
        command.
        """
        created = time.time() if self.is_new else self.folder.read_search().created
        shown = replace(search, created=created, args=redact_args(search.args))
        write_atomically(self.folder.spec, shown.to_json())
        with open(self.folder.points, "a", encoding="utf-8") as file:
            if any(point.args and redact_args(point.args) != point.args for point in new):
                os.fchmod(file.fileno(), 0o600)  # lines of a list, as they are: they have secrets
            file.write("".join(point.to_line() for point in new))

    # -- existing trials
    # -------------------------------------------------------------------------------

    def never_started(self) -> list[int]:
        """Return the trials that no command has submitted or started: one was killed before it
        could, or Slurm refused its jobs.
        """
        if self.folder.cancelled.exists() or is_starting(self.folder):
            return []
        lines = self.folder.read_jobs()
        known = {number for line in lines for tasks in line["tasks"].values() for number in tasks}
        numbers = [point.number for point in self.points if point.number not in known]
        return [number for number in numbers if not self.folder.trial(number).path.exists()]

    @contextmanager
    def reopened(self, numbers: Iterable[int]) -> Iterator[None]:
        """Remove the results of trials that will run again. They are back if the body fails."""
        marks = [self.folder.cancelled]
        for number in numbers:
            trial = self.folder.trial(number)
            marks += [trial.result, trial.cancelled]
        texts = {path: path.read_text(encoding="utf-8") for path in marks if path.exists()}
        for path in texts:
            path.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            for path, text in texts.items():
                write_atomically(path, text)
            raise


@contextmanager
def mark_starter(submission: Path) -> Iterator[None]:
    """Mark a submission whose trials this process is still starting, for other commands on this
    machine.
    """
    mark = submission / STARTER
    write_atomically(mark, claims.describe_processes([os.getpid()]) + "\n")
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def is_starting(sweep: SweepFolder) -> bool:
    """Return whether another command on this machine is still starting trials of a sweep."""
    for mark in sweep.path.glob(f"submissions/*/{STARTER}"):
        with suppress(OSError, ValueError):
            if set(claims.live_pids(json.loads(mark.read_text(encoding="utf-8")))) - {os.getpid()}:
                return True
    return False


def find_pids(trial: RunFolder) -> set[int]:
    """Return the commands on this machine that run a trial now, except this one."""
    holder = claims.find_holder(trial)
    if holder is None or holder.job is not None or holder.whereabouts() != claims.HERE:
        return set()
    return set(holder.pids()[:1]) - {os.getpid()}
