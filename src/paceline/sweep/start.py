"""What every start of a sweep does: choose the trials, fill the submission's folder, and run
them.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import Point
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch import run_folder as folders
from paceline.launch.secrets import read_secrets
from paceline.launch.submission import fill_folder, path_in_run
from paceline.slurm import squeue_and_sacct
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.spec.shell_text import quote, to_type
from paceline.sweep.folder import SweepWriter
from paceline.sweep.results import read_sweep
from paceline.sweep.settings import (
    TPE_PARALLEL,
    SweepSettings,
    check_reachable,
    describe_point,
    identity,
    new_trials,
)

log = logging.getLogger(__name__)

SHOWN_TRIALS = 20  # in a dry run


class SweepStart(ABC):
    """One `paceline sweep`: runs new trials of a sweep, or some of its old ones again."""

    def __init__(self, settings: SweepSettings) -> None:
        self.settings = settings
        self.search = settings.search
        run_path = folders.new_run_path(settings.job, os.environ)
        self.writer = SweepWriter(
            RunPath(run_path.scratch, run_path.project, run_path.experiment, self.search.name)
        )
        self.writer.check_search(self.search)

    @property
    def parallel(self) -> int | None:
        """Trials at the same time; None if only resources limit them."""
        return self.search.parallel or (TPE_PARALLEL if self.search.sampler == "tpe" else None)

    def describe(self, resubmit: str | None) -> str:
        """Return what a dry run prints: the trials, and how they would run."""
        new, numbers = self._choose(resubmit)
        points = {point.number: point for point in (*self.writer.points, *new)}
        lines = [f"sweep   {self.writer.folder.path}", f"trials  {len(numbers)}"]
        for number in numbers[:SHOWN_TRIALS]:
            seed = points[number].seed
            suffix = "" if seed is None else f" (seed {seed})"
            lines.append(f"  {number}: {describe_point(points[number].point)}{suffix}")
        if len(numbers) > SHOWN_TRIALS:
            lines.append(f"  ... and {len(numbers) - SHOWN_TRIALS} more")
        return "\n".join([*lines, self.describe_trials(numbers)])

    def run(self, resubmit: str | None) -> int:
        """Run or submit the trials. Return the exit code."""
        self._check_optuna()
        if self.search.sampler == "wandb":
            self._connect_wandb()
        new, numbers = self._choose(resubmit)
        return self.run_trials(new, numbers)

    @abstractmethod
    def describe_trials(self, numbers: Sequence[int]) -> str:
        """Return how these trials would run."""

    @abstractmethod
    def run_trials(self, new: Sequence[Point], numbers: Sequence[int]) -> int:
        """Run trials, of which `new` are not in the sweep yet. Return the exit code."""

    def _choose(self, resubmit: str | None) -> tuple[list[Point], list[int]]:
        """Return the trials to add, and the numbers of all that will run."""
        points, name = self.writer.points, self.search.name
        if resubmit is not None:
            # not from an answer that others share: it may be older than the last submission
            trials = read_sweep(self.writer.folder, squeue_and_sacct.states).trials
            numbers = [trial.number for trial in trials if trial.state == resubmit]
            if not numbers:
                raise UsageError(
                    f"There are no {resubmit} trials in {name!r}.",
                    hint=f"List them: {to_type(f'sweep show {quote(name)}')}",
                )
            return [], numbers
        new = new_trials(points, self.settings.requests, seeds=self.settings.seeds)
        asked, left = set(map(identity, self.settings.requests)), self.writer.never_started()
        again = [
            point.number
            for point in points
            if point.number in left and (not asked or identity(point) in asked)
        ]
        numbers = [*again, *(point.number for point in new)]
        if not numbers:
            raise UsageError(
                f"The sweep {name!r} already has all of these trials.",
                hint="Add some with --count or more values, run some again with --resubmit failed "
                "or --resubmit"
                " missing, or choose another --name.",
            )
        return new, numbers

    def _check_optuna(self) -> None:
        """Raise early if the trials run in this Python and it lacks Optuna."""
        is_ours = self.settings.job.environment.kind == "current"
        if is_ours and self.search.sampler == "tpe" and importlib.util.find_spec("optuna") is None:
            raise EnvironmentProblem(
                "This sweep needs Optuna, which is not installed.",
                hint="Install it with `pip install 'paceline[sweep]'`.",
            )

    def _connect_wandb(self) -> None:
        """Check that W&B is reachable before anything is written."""
        job = self.settings.job
        variables = {**job.environment.variables, **read_secrets(job, os.environ).values}
        check_reachable({**os.environ, **variables})
        log.info(f"points come from the W&B sweep {self.search.wandb_sweep}")
        # It may have more points by now.
        self.writer.folder.search_exhausted.unlink(missing_ok=True)

    # -- the submission's folder
    # -----------------------------------------------------------------------

    @contextmanager
    def new_submission(
        self, run_path: RunPath, new: Sequence[Point], numbers: Sequence[int]
    ) -> Iterator[None]:
        """Create the submission's folder, which goes if the body fails, and record its trials."""
        with folders.open_run_folder(run_path, is_new=True):
            self.writer.add_trials(self.search, new)
            with self.writer.reopened(numbers):
                yield

    def prepare(
        self,
        run_path: RunPath,
        launch_spec: LaunchSpec,
        *,
        job: Job,
        backend: str,
        snapshot_required: bool,
    ) -> tuple[str, ...]:
        """Write what all trials share: the code, the run half and the launch spec. Return notes."""
        # With their secrets: only the user can read the launch spec.
        launch_spec = replace(
            launch_spec, experiment=self.writer.run_path.experiment, args=list(self.search.args)
        )
        notes = fill_folder(
            job,
            run_path=run_path,
            launch_spec=launch_spec,
            command=["paceline", *sys.argv[1:]],
            backend=backend,
            in_copy=snapshot_required,
        )
        if self.search.sampler == "list":
            # Scripts of earlier trials too: their lines may be gone from the list.
            earlier = (point.program for point in self.writer.points if point.program)
            programs = {}
            for name in dict.fromkeys((*self.settings.scripts, *earlier)):
                path = job.cwd / name
                programs[name] = str(
                    path_in_run(path, job=job, run_path=run_path) if snapshot_required else path
                )
            write_atomically(run_path.folder.path / "programs.json", json.dumps(programs) + "\n")
        return tuple(notes)

    def report_start(self, line: str) -> None:
        print(line, flush=True)
        print(f"  folder  {self.writer.folder.path}")
        print(f"  state   {to_type(f'sweep show {quote(self.search.name)}')}")


def count_trials(number: int) -> str:
    return f"{number} trial{'' if number == 1 else 's'}"
