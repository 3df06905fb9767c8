"""Trials as tasks of job arrays: how many trials a task runs, and which tasks make an array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
