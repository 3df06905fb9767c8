"""Keys of samples by their values: equal for equal samples, however much padding their batches have added."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from paceline.tools.prove.records import CaseRecords

Row = Sequence[Sequence[int]]  # the columns of a sample, as the recorder writes them


class ValueKeys:
    """Turns what two cases have recorded of samples into keys."""

    def __init__(self, *cases: CaseRecords) -> None:
        rows = [
            row
            for each in cases
            for rank in each.ranks
            for step in rank.steps.values()
            for row in step.get("contents") or ()
        ]
        sizes: dict[int, set[int]] = defaultdict(set)
        for row in rows:
            for number, (size, _, _) in enumerate(row):
                sizes[number].add(size)
        self._padded = {number for number, found in sizes.items() if len(found) > 1}
        self._parents: dict[tuple[int, int], tuple[int, int]] = {}
        for row in rows:
            for number in self._padded & set(range(len(row))):
                _, whole, stripped = row[number]
                self._join((number, whole), (number, stripped))

    def key(self, row: Row) -> Hashable:
        return tuple(
            self._find((number, column[1])) if number in self._padded else column[1]
            for number, column in enumerate(row)
        )

    def of(self, rows: Sequence[Any] | None) -> list[Hashable] | None:
        return None if rows is None else [self.key(row) for row in rows]

    def count(self, records: CaseRecords, step: int) -> Counter[Hashable] | None:
        """Count the samples of a step on all ranks; None if one rank has not recorded them."""
        keys = self.of(records.together(step, "contents"))
        return None if keys is None else Counter(keys)

    def _find(self, one: tuple[int, int]) -> tuple[int, int]:
        while (parent := self._parents.get(one, one)) != one:
            one = parent
        return one

    def _join(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        first, second = sorted((self._find(one), self._find(other)))
        self._parents[second] = first
