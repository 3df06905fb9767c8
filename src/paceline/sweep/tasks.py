"""Trials as tasks of job arrays: how many each task runs, and how the tasks are cut into arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """One call of sbatch: array indices, and the trials that each runs."""

    tasks: dict[int, list[int]]

    @property
    def trials(self) -> list[int]:
        return [number for numbers in self.tasks.values() for number in numbers]

    def listing(self) -> str:
        """The list that the tasks read: an index, then its trials."""
        lines = [f"{index} {' '.join(map(str, numbers))}" for index, numbers in self.tasks.items()]
        return "\n".join(lines) + "\n"

    def array(self, parallel: int | None) -> str:
        """`0-3,7%4`, as sbatch takes it."""
        return ranges(self.tasks) + (f"%{parallel}" if parallel is not None else "")


def group(numbers: Sequence[int], *, pack: int = 1, most_tasks: int | None = None) -> list[list[int]]:
    """Trials per task: as many as run side by side, and more where there may not be so many tasks."""
    each = pack
    if most_tasks is not None and numbers:
        each = max(pack, math.ceil(len(numbers) / max(1, most_tasks)))
        each = math.ceil(each / pack) * pack
    return [list(numbers[start : start + each]) for start in range(0, len(numbers), each)]


def cut(tasks: Sequence[list[int]], *, most: int) -> list[Chunk]:
    """Arrays of at most `most` tasks. Where tasks have one trial each, its number is the index, as far as it fits."""
    fewest = math.ceil(len(tasks) / most)
    if all(len(numbers) == 1 for numbers in tasks):
        windows: dict[int, dict[int, list[int]]] = {}
        for numbers in tasks:
            window, index = divmod(numbers[0], most)
            windows.setdefault(window, {})[index] = numbers
        if len(windows) <= fewest:
            return [Chunk(window) for window in windows.values()]
    return [Chunk(dict(enumerate(tasks[start : start + most]))) for start in range(0, len(tasks), most)]


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
