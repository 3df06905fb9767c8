"""The cases of a proof, and what their ranks have recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_objects
from paceline.contract.rank_records import END, START, STEP, record_path
from paceline.errors import UsageError

DEFAULT_STYLE = "fork"


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    ranks: int
    steps: int
    style: str = DEFAULT_STYLE
    interrupted: bool = False  # stopped in the middle, and resumed
    changes: tuple[str, ...] = ()  # what is off, to find out what a difference comes from
    without: tuple[str, ...] = ()  # the same for all cases of a proof, so not part of the name
    repeat: int = 0

    @property
    def name(self) -> str:
        parts = [count_ranks(self.ranks)]
        if self.style != DEFAULT_STYLE:
            parts.append(self.style)
        if self.interrupted:
            parts.append("interrupted")
        if self.changes:
            parts.append(f"without {' and '.join(self.changes)}")
        if self.repeat:
            parts.append("again")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return self.name.replace(",", "").replace(" ", "-")


def count_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def plan_cases(
    ranks: Sequence[int], styles: Sequence[str], *, steps: int, interrupt: bool
) -> list[Case]:
    """Return the runs of a proof, the reference first.

    Every number of ranks runs in the first style. The other styles, and the interruption, run at
    the first number above one: they have to repeat that run bit for bit.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(
            "--ranks needs different numbers, each at least 1.", hint="For example --ranks 1,2,4."
        )
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
    """The records of one rank. A run that was interrupted has written some steps twice: the last
    ones count.
    """

    start: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RankRecords:
        found = cls()
        for record in read_objects(path):
            if record.get("kind") == START:
                found.start = found.start or record
            elif record.get("kind") == STEP:
                found.steps[int(record["step"])] = record
            elif record.get("kind") == END:
                found.end = record
        return found


@dataclass
class CaseRecords:
    """What a case has done: the records of its ranks."""

    case: Case
    ranks: list[RankRecords]
    note: str = ""  # what a reader should know about this run
    stopped_after: int = 0  # the step of the interruption

    @property
    def first(self) -> RankRecords:
        return self.ranks[0]

    @property
    def ranks_text(self) -> str:
        return count_ranks(self.case.ranks)

    @property
    def uses_runtime(self) -> bool:
        return bool(self.first.start.get("runtime"))

    @property
    def uses(self) -> set[str]:
        """What the model uses that may depend on the ranks: dropout, BatchNorm, random numbers."""
        return {use for rank in self.ranks for use in rank.end.get("uses", ())}

    @property
    def dtype(self) -> str:
        return str(self.first.start.get("dtype", "float32"))

    def of_ranks(self, step: int, key: str) -> list[Any] | None:
        """Return what each rank has recorded in a step; None if one of them has nothing."""
        found = [rank.steps.get(step, {}).get(key) for rank in self.ranks]
        return None if any(each is None for each in found) else found

    @cached_property
    def losses(self) -> dict[int, float]:
        """The loss of each step's backward passes, averaged over the ranks.

        What a script prints does not count: usually, that is the loss of rank 0's own samples.
        """
        found = {}
        for step in sorted(self.first.steps):
            losses = self.of_ranks(step, "losses") or [[]]
            if all(losses):
                found[step] = math.fsum(math.fsum(each) for each in losses) / len(losses)
        return found


def read_ranks(folder: Path, count: int) -> list[RankRecords]:
    return [RankRecords.read(record_path(folder, rank)) for rank in range(count)]
