"""The folder of a sweep and of its trials, which both halves read and write.

    <scratch>/<project>/<experiment>/<sweep>/
      sweep.json      what to search for, and how (`Search`)
      points.jsonl    one line per trial (`Point`), appended by `paceline sweep`
      chosen/G.json   the point that the sampler chose for group G, if it chooses when trials start
      optuna.journal  Optuna's study, for TPE
      jobs.jsonl      one line per call of sbatch
      submissions/N/  what the trials of one `paceline sweep` share: code, run half, script, lists
      of tasks trials/NUMBER/  a run folder with trial.json, reports.jsonl and result.json

Standard library only, like everything that runs inside jobs.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import make, read_object, read_objects
from paceline.contract.run_folder import Entry, RunFolder
from paceline.errors import EnvironmentProblem

# How a trial ended. Whether it is queued, running or lost depends on its job.
DONE, PRUNED, FAILED = "done", "pruned", "failed"
read_lines = read_objects  # of points, reports and metrics
SUBMITTED = "submitted"  # in the folder of a submission: exists once no more jobs follow
NO_POINT = "none"  # the state of a trial for which the search had no point left


class NoPoint(Exception):
    """Raised when there is nothing to run: the search has no points left, or the trial's point was
    pruned.
    """


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    spec = Entry("sweep.json")  # what to search for, and how
    points = Entry("points.jsonl")  # the trials, one line each: number, group, point, seed
    journal = Entry("optuna.journal")  # the study of Optuna, for TPE
    jobs = Entry("jobs.jsonl")  # the calls of sbatch, one line each, with the trials of each task
    cancelled = Entry("cancelled")  # exists once the sweep is cancelled: no trial of it starts

    def chosen_point(self, group: int) -> Path:
        return self.path / "chosen" / f"{group}.json"

    search_exhausted = Entry("chosen/exhausted")  # exists while the search has no more points
    trials = Entry("trials")  # a run folder for each trial

    def trial(self, number: int) -> TrialFolder:
        return TrialFolder(self.trials / str(number))

    def submission(self, number: int) -> Path:
        return self.path / "submissions" / str(number)

    def read_search(self) -> Search:
        try:
            return make(Search, read_object(self.spec))
        except (OSError, ValueError) as problem:
            raise EnvironmentProblem(
                f"Cannot read {self.spec}: {problem}.",
                hint="Start a sweep of another name with --name.",
            ) from None

    def read_points(self) -> list[Point]:
        """Return all trials, by number."""
        found = []
        for line in read_lines(self.points):
            with suppress(ValueError):
                found.append(make(Point, line))
        return sorted(found, key=lambda point: point.number)

    def read_jobs(self) -> list[dict[str, Any]]:
        """Return the calls of sbatch, oldest first: {"time", "job", "submission", "tasks": {INDEX:
        [NUMBER]}}.
        """
        return [line for line in read_lines(self.jobs) if _is_job(line)]

    def record_job(self, job: str, *, submission: str, tasks: dict[int, list[int]]) -> None:
        line = {"time": time.time(), "job": job, "submission": submission, "tasks": tasks}
        with open(self.jobs, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class TrialFolder(RunFolder):
    """A trial's run folder."""

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.path.parent.parent)

    # its number, point, seed, group, and number in Optuna's study. Written when it starts
    trial = Entry("trial.json")
    # what the script reported, a line each: {"step", "value", "time"}
    reports = Entry("reports.jsonl")
    # how it ended for good: state, value, step, times, error, point, seed
    result = Entry("result.json")
    pruned = Entry("pruned")  # exists once the pruner has decided to end the trial


@dataclass(frozen=True)
class Point:
    """One trial: its point and its seed. Equal points with different seeds form a group."""

    number: int
    group: int
    point: dict[str, Any] | None  # None: the sampler chooses when the group's first trial starts
    seed: int | None = None
    program: str | None = None  # lists of command lines: the script, as written
    args: list[str] | None = None  # and all of its arguments

    def to_line(self) -> str:
        table = {
            key: value for key, value in asdict(self).items() if value is not None or key == "point"
        }
        return json.dumps(table, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Search:
    """What to search for, and how."""

    name: str
    metric: str | None = None
    direction: str = "minimize"
    sampler: str = "grid"  # grid | random | tpe | list | wandb
    wandb_sweep: str = ""  # ENTITY/PROJECT/ID of the W&B sweep that chooses points
    prune: str = "none"  # none | halving | median
    prune_after: int = 1  # reports of every trial before it may be pruned
    seed: int = 0  # of the sampler
    # key -> one range, and optionally `when`
    space: dict[str, dict[str, Any]] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)  # arguments of the script, with {key} for values
    arguments: str = "options"  # options: keys that `args` lacks follow as --key value; or none
    parallel: int | None = None
    file: str = ""  # it was read from
    script: str = ""  # from --script: a list of arguments alone does not name it
    created: float = 0.0

    @property
    def chooses_late(self) -> bool:
        """Whether the sampler chooses points only when trials start."""
        return self.sampler in ("tpe", "wandb")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def _is_job(line: dict[str, Any]) -> bool:
    tasks = line.get("tasks")
    return isinstance(tasks, dict) and all(
        isinstance(trials, list) and all(isinstance(number, int) for number in trials)
        for trials in tasks.values()
    )


def is_active(when: dict[str, list[Any]], point: dict[str, Any]) -> bool:
    """Return whether a conditional key applies to a point, given the values of earlier keys."""
    return all(key in point and point[key] in values for key, values in when.items())


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
