"""The cases of a proof, what their ranks have recorded, and what they have logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_objects
from paceline.contract.rank_records import END, OTHER_DRAWS, START, STEP, record_path
from paceline.errors import UsageError

DEFAULT_STYLE = "fork"


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    ranks: int
    steps: int
    style: str = DEFAULT_STYLE
    interrupted: bool = False  # stopped in the middle, and resumed
    # what is off or different, to find out what a difference comes from
    changes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # the same for all cases of a proof, so not part of the name
    repeat: int = 0

    @property
    def name(self) -> str:
        parts = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"]
        if self.style != DEFAULT_STYLE:
            parts.append(self.style)
        if self.interrupted:
            parts.append("interrupted")
        changes = [each for each in self.changes if each != OTHER_DRAWS]
        if changes:
            parts.append(f"without {' and '.join(changes)}")
        if OTHER_DRAWS in self.changes:
            parts.append(OTHER_DRAWS)
        if self.repeat:
            parts.append("again")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return f"{self.name}, {self.steps} steps".replace(",", "").replace(" ", "-")


def plan_cases(
    ranks: Sequence[int], styles: Sequence[str], *, steps: int, interrupt: bool
) -> list[Case]:
    """Return the runs of a proof, the reference first.

    Every number of ranks runs in the first style. The other styles, and the interruption, run at the first number
    above one: they have to repeat that run bit for bit.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(
            "--ranks needs different numbers, each at least 1.", hint="For example --ranks 1,2,4."
        )
    if not styles:
        raise UsageError("--styles is empty.", hint="For example --styles fork,torchrun.")
    if steps < 2:
        raise UsageError(
            f"--steps {steps} is too few to compare.", hint="Use at least 2; the default is 30."
        )
    found = [Case(count, steps, styles[0]) for count in ranks]
    several = next((case for case in found if case.ranks > 1), found[0])
    found += [replace(several, style=style) for style in styles[1:]]
    if interrupt:
        found.append(replace(several, interrupted=True))
    if len(found) == 1:
        found.append(replace(several, repeat=1))
    return found


@dataclass
class RankRecords:
    """The records of one rank. A run that was interrupted has written some steps twice: the last ones count."""

    start: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    starts: int = 0

    @classmethod
    def read(cls, path: Path) -> RankRecords:
        found = cls()
        for record in read_objects(path):
            if record.get("kind") == START:
                found.start = found.start or record
                found.starts += 1
            elif record.get("kind") == STEP:
                found.steps[int(record["step"])] = record
            elif record.get("kind") == END:
                found.end = record
        return found


@dataclass
class CaseRecords:
    """What a case has done: the records of its ranks, and what it logged."""

    case: Case
    ranks: list[RankRecords]
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # by name, then by step
    note: str = ""  # what a reader should know about this run

    stopped_after: int = 0  # the step of the interruption

    @property
    def first(self) -> RankRecords:
        return self.ranks[0]

    @property
    def ranks_text(self) -> str:
        return f"{self.case.ranks} rank{'s' if self.case.ranks > 1 else ''}"

    @property
    def uses_runtime(self) -> bool:
        return bool(self.first.start.get("runtime"))

    @property
    def uses(self) -> set[str]:
        """What the model uses that may depend on the ranks: dropout, BatchNorm, random numbers."""
        return {use for rank in self.ranks for step in rank.steps.values() for use in step["uses"]}

    @property
    def dtype(self) -> str:
        return str(self.first.start.get("autocast") or self.first.start.get("dtype") or "float32")

    def together(self, step: int, key: str) -> list[Any] | None:
        """Return what all ranks have recorded in a step, in one list; None if one of them has nothing."""
        found: list[Any] = []
        for rank in self.ranks:
            values = rank.steps.get(step, {}).get(key)
            if values is None:
                return None
            found += values if isinstance(values, list) else [values]
        return found

    def backward_losses(self) -> dict[int, float]:
        """Return the loss of each step's backward passes, averaged over the ranks."""
        steps = set.intersection(*(set(rank.steps) for rank in self.ranks)) if self.ranks else set()
        found = {}
        for step in sorted(steps):
            losses = [rank.steps[step]["losses"] for rank in self.ranks]
            if all(losses):
                found[step] = math.fsum(math.fsum(each) for each in losses) / len(losses)
        return found


def read_ranks(folder: Path, count: int) -> list[RankRecords]:
    return [RankRecords.read(record_path(folder, rank)) for rank in range(count)]


def read_logged(path: Path) -> dict[str, dict[int, float]]:
    """Return the numbers of a file of JSON lines. Lines without a step count as one step each."""
    found: dict[str, dict[int, float]] = {}
    for number, line in enumerate(read_objects(path), start=1):
        step = line.get("step", line.get("iteration", number))
        for name, value in line.items():
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and isinstance(step, int)
            ):
                found.setdefault(name, {})[step] = float(value)
    return found
