"""Which samples each step got in two cases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tools.prove.causes import BATCH, EITHER, SAMPLER, VALUES, Cause
from paceline.tools.prove.records import CaseRecords


@dataclass(frozen=True)
class SampleEvidence:
    """What is known about the samples of two cases."""

    cause: Cause | None = None  # the first step that differs
    step: int = 0  # which one it is
    knows_samples: bool = False  # the same samples in every step before that
    knows_values: bool = False  # and the same values

    def __str__(self) -> str:
        """Say what the two have in common, for steps before the cause, and what was not
        recorded.
        """
        when = f"Before step {self.step}, the" if self.cause is not None else "The"
        if self.knows_values:
            return f"{when} ranks get the same samples, with the same values."
        if self.knows_samples:
            return f"{when} ranks get the same samples; their values were not recorded."
        return "Which samples the ranks get was not recorded."


class SampleComparison:
    """Compares the samples of two cases, step by step.

    Samples have numbers, unless they come from a stream, and values, unless they are no tensors or
    padded: the length of padding depends on the longest sample of a rank's batch.
    """

    def __init__(self, reference: CaseRecords, other: CaseRecords) -> None:
        self.reference, self.other = reference, other
        self.steps = sorted(set(reference.first.steps) & set(other.first.steps))
        sizes: dict[int, set[int]] = defaultdict(set)
        for case in (reference, other):
            for step in self.steps:
                for rows in case.of_ranks(step, "contents") or ():
                    for row in rows:
                        for column, (size, _) in enumerate(row):
                            sizes[column].add(size)
        self._fixed = [column for column, found in sizes.items() if len(found) == 1]
        self._is_padded = len(self._fixed) < len(sizes)

    def compare(self) -> SampleEvidence:
        if not self.steps:
            return SampleEvidence()
        knows_samples = knows_values = True
        for step in self.steps:
            numbers, values = self._numbers_agree(step), self._values_agree(step)
            cause = self._find_cause(step, numbers, values)
            if cause is not None:
                is_later = step != self.steps[0]
                return SampleEvidence(
                    cause, step, knows_samples and is_later, knows_values and is_later
                )
            knows_values = knows_values and values is True
            knows_samples = knows_samples and (values or numbers) is True
        return SampleEvidence(knows_samples=knows_samples, knows_values=knows_values)

    # -- numbers and values
    # ------------------------------------------------------------------------------

    def _values(self, case: CaseRecords, step: int) -> list[list[Hashable]] | None:
        """Return the values of each rank's samples; None if they are not known."""
        contents = case.of_ranks(step, "contents")
        if contents is None or not self._fixed:
            return None
        return [[tuple(row[each][1] for each in self._fixed) for row in rows] for rows in contents]

    def _numbers(self, case: CaseRecords, step: int) -> list[list[Hashable]] | None:
        """Return the numbers of each rank's samples; None if they are not known, or if each rank
        counts samples of its own.
        """
        numbers = case.of_ranks(step, "samples")
        if numbers is None:
            return None
        values = self._values(case, step)
        if _are_equal(numbers) and (values is None or not _are_equal(values)):
            return None
        return [[str(each) for each in rank] for rank in numbers]

    def _values_agree(self, step: int) -> bool | None:
        return _agree(self._values(self.reference, step), self._values(self.other, step))

    def _numbers_agree(self, step: int) -> bool | None:
        return _agree(self._numbers(self.reference, step), self._numbers(self.other, step))

    def _keys(self, case: CaseRecords, step: int) -> list[list[Hashable]]:
        """Return what is known of each rank's samples."""
        return self._numbers(case, step) or self._values(case, step) or []

    # -- causes
    # ------------------------------------------------------------------------------------------

    def _find_cause(self, step: int, numbers: bool | None, values: bool | None) -> Cause | None:
        ranks, before = self.other.case.ranks, self.reference.case.ranks
        keys = self._keys(self.other, step)
        is_repeated = _are_equal(keys)
        one, two = (_count_rows(each, step) for each in (self.reference, self.other))
        is_whole = ranks != before and two * before == one * ranks > 0
        if step == self.steps[0] and is_whole and not is_repeated:
            return Cause(
                BATCH,
                f"A step has {two} samples with {ranks} ranks and {one} with {before}: each rank "
                "takes a whole batch.",
            )
        is_other = numbers is False and (values is not True or self._is_padded)
        if not is_other and values is not False:
            return None
        if numbers:
            return Cause(
                VALUES,
                f"Step {step} has the same samples with {ranks} ranks as with {before}, but "
                f"{self._count_other(step)} of {two} reach the model with different values.",
            )
        what = f"In step {step}, {ranks} ranks have different samples from {before}"
        if is_repeated:
            what = (
                f"In step {step}, all {ranks} ranks have the same {two // ranks} samples: the data "
                "is not split."
            )
        elif one != two:
            what += f", {two} instead of {one}: the end of an epoch is dropped or padded."
        elif numbers is False or self._share_samples():
            what += (
                ": each rank draws from all of the data by itself, or the order of the data "
                "depends on the number of ranks."
            )
        else:
            return Cause(
                EITHER,
                f"{what}, and no sample of the first {len(self.steps)} steps appears in both runs. "
                "The samples have no numbers, so Paceline cannot tell whether they are different "
                "samples or the same ones with different values.",
            )
        return Cause(SAMPLER, what)

    def _count_other(self, step: int) -> int:
        one, two = (_counted(self._values(each, step)) for each in (self.reference, self.other))
        return (two - one).total()

    def _share_samples(self) -> bool:
        """Return whether any sample appears in both runs."""
        one, two = (
            {key for step in self.steps for rank in self._keys(case, step) for key in rank}
            for case in (self.reference, self.other)
        )
        return not one.isdisjoint(two)


def _counted(ranks: Sequence[Sequence[Hashable]] | None) -> Counter[Hashable]:
    return Counter(key for rank in ranks or () for key in rank)


def _agree(one: list[list[Hashable]] | None, two: list[list[Hashable]] | None) -> bool | None:
    return None if one is None or two is None else _counted(one) == _counted(two)


def _are_equal(ranks: Sequence[Any]) -> bool:
    """Return whether several ranks have the same."""
    return len(ranks) > 1 and bool(ranks[0]) and all(each == ranks[0] for each in ranks)


def _count_rows(case: CaseRecords, step: int) -> int:
    return sum(case.of_ranks(step, "rows") or [])
