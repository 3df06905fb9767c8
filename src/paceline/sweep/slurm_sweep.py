"""A sweep's trials as job arrays: one call of sbatch per array, as few arrays as the cluster
allows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import SUBMITTED, Point
from paceline.errors import ClusterError, JobRejected
from paceline.launch.slurm_job import SlurmJob, write_files
from paceline.slurm import commands as slurm
from paceline.slurm.sbatch import (
    JOB_LIMIT_REACHED,
    Trials,
    array_size_limit,
    max_new_jobs,
    submit_array,
)
from paceline.spec.shell_text import command_line, quote, to_type
from paceline.sweep.folder import mark_starter
from paceline.sweep.settings import SweepSettings
from paceline.sweep.start import SweepStart, count_trials

log = logging.getLogger(__name__)

SHOWN_JOBS = 5


class SlurmSweep(SweepStart):
    """A sweep whose trials are tasks of job arrays."""

    def __init__(self, settings: SweepSettings) -> None:
        super().__init__(settings)
        self.jobs: list[str] = []
        self.submitted = 0  # trials

    @cached_property
    def job_submission(self) -> SlurmJob:
        trials = Trials(self.writer.folder.path, self.settings.pack)
        path = self.writer.submission_path()
        return SlurmJob(self.settings.job, run_path=path, trials=trials)

    def describe_trials(self, numbers: Sequence[int]) -> str:
        plan = self.job_submission.plan
        pack, known = self.settings.pack, slurm.available()
        allowed = max_new_jobs(len(numbers)) if known else None
        chunks = plan_chunks(
            numbers,
            pack=pack,
            max_array=array_size_limit() if known else 1001,
            max_tasks=smallest(allowed, self.settings.tasks),
        )
        calls = [
            command_line(
                [
                    *plan.sbatch[:-1],
                    f"--array={chunk.array(self.throttle)}",
                    plan.sbatch[-1],
                    f"tasks-{number}",
                ]
            )
            for number, chunk in enumerate(chunks, 1)
        ]
        preview = [
            "Each task runs the trials on its line of a list. This is a preview: nothing has been "
            "written."
        ]
        script = replace(plan.sections, advice=preview)
        return "\n".join(["", str(script), *(f"# submitted by: {call}" for call in calls)])

    def run_trials(self, new: Sequence[Point], numbers: Sequence[int]) -> int:
        for warning in self.job_submission.check():
            log.info(f"{warning.text}{f' ({warning.hint})' if warning.hint else ''}")
        job = self.job_submission.job
        refusal: ClusterError | None = None
        run_path = self.job_submission.run_path
        with self.new_submission(run_path, new, numbers), mark_starter(run_path.folder.path):
            plan = self.job_submission.plan
            notes = self.prepare(
                run_path, plan.launch_spec, job=job, backend="slurm", snapshot_required=True
            )
            write_files(plan)
            (run_path.folder.path / "logs").mkdir()
            try:
                self._submit_all(numbers)
            except ClusterError as problem:
                if not self.jobs:
                    raise
                refusal = problem  # arrays that are queued stay
            except BaseException:  # such as Ctrl-C: their trials are undone
                self._withdraw()
                raise
            # Its last task removes the secrets of a submission, and more tasks might follow before
            # this.
            write_atomically(run_path.folder.path / SUBMITTED, "")
        for note in (*plan.notes, *notes):
            log.info(note)
        self._report()
        if refusal is not None:
            raise ClusterError(
                f"{count_trials(len(numbers) - self.submitted)} could not be submitted: "
                f"{refusal.message}",
                hint="Submit them later: "
                f"{to_type(f'sweep --resubmit missing {quote(self.search.name)}')}",
            )
        return 0

    def _report(self) -> None:
        jobs, name = self.jobs, self.search.name
        listed = ", ".join(jobs[:SHOWN_JOBS]) + (", ..." if len(jobs) > SHOWN_JOBS else "")
        parallel = f", {self.parallel} at a time" if self.parallel else ""
        trials = count_trials(self.submitted)
        self.report_start(
            f"submitted {trials} of {name} as job{'s' if len(jobs) > 1 else ''} {listed}{parallel}"
        )
        print(f"  cancel  {to_type(f'sweep cancel {quote(name)}')}")

    @property
    def throttle(self) -> int | None:
        """The most tasks of an array at a time: Slurm limits tasks; the user's limit counts
        trials.
        """
        pack = self.settings.pack
        return None if self.parallel is None else max(1, math.ceil(self.parallel / pack))

    def _submit_all(self, numbers: Sequence[int]) -> None:
        """Submit all trials. If Slurm rejects the number of jobs, try fewer and longer tasks."""
        max_array = array_size_limit()
        max_tasks = smallest(max_new_jobs(len(numbers)), self.settings.tasks)
        left = list(numbers)
        while left:
            for chunk in plan_chunks(
                left, pack=self.settings.pack, max_array=max_array, max_tasks=max_tasks
            ):
                try:
                    self._submit(chunk)
                except JobRejected as rejected:
                    tasks = math.ceil(len(left) / max(1, len(chunk.trials) // len(chunk.tasks)))
                    if not JOB_LIMIT_REACHED.search(rejected.reason) or tasks < 2:
                        raise
                    max_tasks = tasks // 2
                    break
                left = left[len(chunk.trials) :]

    def _withdraw(self) -> None:
        """Cancel the arrays that are queued. A task that starts nevertheless ends at once."""
        for number in range(1, len(self.jobs) + 1):
            write_atomically(
                self.job_submission.run_path.folder.path / f"cancelled-tasks-{number}",
                f"{time.time():.0f}\n",
            )
        with suppress(ClusterError):
            slurm.cancel_jobs(self.jobs)

    def _submit(self, chunk: Chunk) -> None:
        folder = self.job_submission.run_path.folder.path
        listing = f"tasks-{len(self.jobs) + 1}"
        write_atomically(folder / listing, chunk.listing())
        # Slurm throttles each array separately, so arrays run one after the other to keep to the
        # limit together.
        after = self.jobs[-1:] if self.throttle is not None else []
        job = submit_array(
            self.job_submission.plan,
            array=chunk.array(self.throttle),
            listing=listing,
            after=after,
            known=self.jobs,
        )
        self.jobs.append(job)
        self.submitted += len(chunk.trials)
        self.writer.folder.record_job(job, submission=folder.name, tasks=chunk.tasks)


def plan_chunks(
    numbers: Sequence[int], *, pack: int, max_array: int, max_tasks: int | None
) -> list[Chunk]:
    """Return the arrays for these trials. If too few jobs are allowed, a task runs several trials
    in turn.
    """
    return cut(group(numbers, pack=pack, max_tasks=max_tasks), max_array=max_array)


def smallest(*limits: int | None) -> int | None:
    """Return the smallest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class Chunk:
    """One job array: its indices, and the trials that each runs."""

    tasks: dict[int, list[int]]

    @property
    def trials(self) -> list[int]:
        return [number for numbers in self.tasks.values() for number in numbers]

    def listing(self) -> str:
        """Return the file that the tasks read: a line per index, followed by its trials."""
        lines = [f"{index} {' '.join(map(str, numbers))}" for index, numbers in self.tasks.items()]
        return "\n".join(lines) + "\n"

    def array(self, parallel: int | None) -> str:
        """Return the value of sbatch --array, such as `0-3,7%4`."""
        return ranges(self.tasks) + (f"%{parallel}" if parallel is not None else "")


def group(
    numbers: Sequence[int], *, pack: int = 1, max_tasks: int | None = None
) -> list[list[int]]:
    """Return each task's trials: `pack` of them, or more if that would take more than `max_tasks`
    tasks.
    """
    each = pack
    if max_tasks is not None and numbers:
        each = max(pack, math.ceil(len(numbers) / max(1, max_tasks)))
        each = math.ceil(each / pack) * pack
    return [list(numbers[start : start + each]) for start in range(0, len(numbers), each)]


def cut(tasks: Sequence[list[int]], *, max_array: int) -> list[Chunk]:
    """Return arrays of at most `max_array` tasks. A task of one trial has the trial's number as
    index if it fits.
    """
    fewest = math.ceil(len(tasks) / max_array)
    if all(len(numbers) == 1 for numbers in tasks):
        windows: dict[int, dict[int, list[int]]] = {}
        for numbers in tasks:
            window, index = divmod(numbers[0], max_array)
            windows.setdefault(window, {})[index] = numbers
        if len(windows) <= fewest:
            return [Chunk(window) for window in windows.values()]
    return [
        Chunk(dict(enumerate(tasks[start : start + max_array])))
        for start in range(0, len(tasks), max_array)
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
