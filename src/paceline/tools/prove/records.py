"""What the ranks of a case have recorded, logged and printed, such as `epoch 3 loss: 1.23e-2`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_objects
from paceline.contract.files.proof_spec import END, START, STEP, record_path
from paceline.errors import RunError
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
    """What a case has done: the records of its ranks, what it logged, and what rank 0 printed."""

    case: Case
    ranks: list[RankRecords]
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # by name, then by step
    printed: str = ""
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

    def printed_losses(self, name: str) -> dict[int, float]:
        """Return the losses that rank 0 has printed, in their order."""
        return read_printed(self.printed, name)


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


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
# A name, such as "loss", and its number: `loss 0.5`, `loss=0.5`, `"loss": 0.5`, `loss: tensor(0.5)`. What follows the
# number must not make another one of it: 12/100 and 1,234 are no losses.
VALUE = (
    r"(?<![\w/.-]){name}['\"]?\s*(?:[:=]|->|\bis\b)?\s*(?:tensor\()?({number})(?![\w%]|[/:.,]\d)"
)
# Words before the name that make it another value: `val loss 0.5` is not the loss of training.
OTHERS = (
    "val",
    "valid",
    "validation",
    "test",
    "testing",
    "eval",
    "evaluation",
    "dev",
    "holdout",
    "best",
    "min",
    "max",
    "minimum",
    "lowest",
    "final",
    "last",
    "previous",
    "old",
    "mean",
    "avg",
    "average",
    "averaged",
    "running",
    "smoothed",
    "epoch",
    "aux",
    "auxiliary",
    "total",
)
LAST_WORD = re.compile(r"([A-Za-z]+)[\s_./-]*$")


def read_printed(text: str, name: str) -> dict[int, float]:
    """Return the values of a name, numbered in their order. Raises RunError if a line has several.

    The name may consist of several words, as in "val loss". Of a line that was drawn several times, as a progress bar
    is, the last state counts: how often it was drawn depends on the time.
    """
    pattern = _pattern(name)
    found: dict[int, float] = {}
    for line in text.split("\n"):
        shown = line.rstrip("\r").rsplit("\r", 1)[-1]
        values = [
            match[1]
            for match in pattern.finditer(shown)
            if not _is_other(shown[: match.start()], name)
        ]
        if len({float(value) for value in values}) > 1:
            raise RunError(
                f"A line that the script prints has several values of {name!r}: {shown.strip()[:200]}",
                hint="Name the right one in full, as in --metric 'train loss', or write JSON lines and name the file "
                "with --metrics FILE.",
            )
        if values:
            found[len(found) + 1] = float(values[0])
    return found


def _pattern(name: str) -> re.Pattern[str]:
    words = r"\s+".join(re.escape(word) for word in name.split())
    return re.compile(VALUE.replace("{name}", words).replace("{number}", NUMBER), re.IGNORECASE)


def _is_other(before: str, name: str) -> bool:
    """Return whether the words before a name make it another one."""
    word = LAST_WORD.search(before)
    return (
        word is not None
        and word[1].lower() in OTHERS
        and word[1].lower() not in name.lower().split()
    )
