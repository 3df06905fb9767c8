"""What the ranks of a case have recorded, and what it has logged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_objects
from paceline.contract.proof_spec import END, START, STEP, record_path
from paceline.tools.prove.cases import Case


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
