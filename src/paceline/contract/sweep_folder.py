"""What the halves agree on about sweeps: the folder of a sweep, and what stands in the folder of each trial.

    <scratch>/<project>/<experiment>/<sweep>/
      sweep.json      what is searched for, and how (`Search`)
      points.jsonl    one line per trial (`Point`); whoever types `paceline sweep` appends to it
      asked/G.json    the point that the sampler gave to group G, where points are not known beforehand
      optuna.journal  what Optuna knows: for TPE, and for pruning
      jobs.jsonl      one line per call of sbatch
      submissions/N/  what one `paceline sweep` brought along: code, run half, environment, script, lists of tasks
      trials/NUMBER/  a run folder like any other, and in it trial.json, reports.jsonl, result.json

Standard library only, as all that runs inside jobs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder

# How a trial ended. Whatever else it is (queued, running, lost) follows from its job.
DONE, PRUNED, FAILED = "done", "pruned", "failed"
ASKING_SAMPLERS = ("tpe", "wandb")  # the others know all points beforehand
NO_POINT = "none"  # the state of a trial for which the search had no point left


class NoPoint(Exception):
    """The search is over: there is nothing left to try."""


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        """`Search`, renamed into place."""
        return self.path / "sweep.json"

    @property
    def points(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "optuna.journal"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs.jsonl"

    @property
    def cancelled(self) -> Path:
        """Present once somebody has cancelled the sweep: no trial of it begins."""
        return self.path / "cancelled"

    def asked(self, group: int) -> Path:
        return self.path / "asked" / f"{group}.json"

    @property
    def asked_for_all(self) -> Path:
        """Present once the search has said that it has no more points; removed when trials are added."""
        return self.path / "asked" / "all"

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    def trial(self, number: int) -> TrialFolder:
        return TrialFolder(self.trials / str(number))

    def submission(self, number: int) -> Path:
        return self.path / "submissions" / str(number)

    def read_search(self) -> Search:
        return Search.from_json(self.spec.read_text(encoding="utf-8"))

    def read_points(self) -> list[Point]:
        """All trials, by number."""
        return sorted((Point(**line) for line in read_lines(self.points)), key=lambda point: point.number)

    def read_jobs(self) -> list[dict[str, Any]]:
        """Calls of sbatch, oldest first: {"time", "job", "submission", "tasks": {"INDEX": [NUMBER, ...]}}."""
        return list(read_lines(self.jobs))


@dataclass(frozen=True)
class TrialFolder(RunFolder):
    """A trial's run folder."""

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.path.parent.parent)

    @property
    def trial(self) -> Path:
        """Which point it is: number, point, seed, group, and its number in Optuna's study. Written when it begins."""
        return self.path / "trial.json"

    @property
    def reports(self) -> Path:
        """What the script reported: {"step", "value", "time"} a line."""
        return self.path / "reports.jsonl"

    @property
    def result(self) -> Path:
        """Written when it has ended for good: state, value, step, started, ended, error, point, seed."""
        return self.path / "result.json"

    @property
    def pruned(self) -> Path:
        """Present once the ranks have agreed to leave, because the trial is not worth going on."""
        return self.path / "pruned"


@dataclass(frozen=True)
class Point:
    """One trial: its point of the space, and its seed. Equal points with different seeds are one group."""

    number: int
    group: int
    point: dict[str, Any] | None  # None: the sampler is asked when the first trial of the group begins
    seed: int | None = None
    program: str | None = None  # lists of command lines: the script, as it was written
    args: list[str] | None = None  # and all of its arguments

    def to_line(self) -> str:
        told = {key: value for key, value in asdict(self).items() if value is not None or key == "point"}
        return json.dumps(told, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Search:
    """What is searched for, and how."""

    name: str
    metric: str | None = None
    direction: str = "minimize"
    sampler: str = "grid"  # grid | random | tpe | list | wandb
    wandb_sweep: str = ""  # ENTITY/PROJECT/ID of the sweep that W&B's service chooses points for
    prune: str = "none"  # none | halving | median
    prune_after: int = 1  # reports that every trial may make
    seed: int = 0  # of the sampler
    space: dict[str, dict[str, Any]] = field(default_factory=dict)  # key -> one range, and perhaps `when`
    args: list[str] = field(default_factory=list)  # words of the script, with {key} for values
    arguments: str = "options"  # options: keys that `args` does not name follow as --key value; or none
    parallel: int | None = None
    file: str = ""  # that it was read from
    script: str = ""  # that was typed: a list of arguments alone does not name it
    created: float = 0.0

    @property
    def asks(self) -> bool:
        """Whether points are chosen only when trials begin."""
        return self.sampler in ASKING_SAMPLERS

    @property
    def needs_optuna(self) -> bool:
        return self.sampler == "tpe" or self.prune != "none"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Search:
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


def is_active(when: dict[str, list[Any]], point: dict[str, Any]) -> bool:
    """Whether a conditional key belongs to a point, by the values of the keys before it."""
    return all(key in point and point[key] in values for key, values in when.items())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of JSON objects; nothing where there is no file, half a line is passed over."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def last_value(trial: TrialFolder, metric: str | None) -> tuple[float | None, int | None]:
    """A trial's value and its step: what was reported last, else the metric's newest line in metrics.jsonl.

    Where that is no number (nan), there is no value: a run that came to nothing is not judged by how it began.
    """
    lines = [("value", line) for line in read_lines(trial.reports)]
    if not lines and metric:
        lines = [(metric, line) for line in read_lines(trial.metrics) if metric in line]
    for name, line in lines[-1:]:
        value = line.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value), line.get("step")
    return None, None
