"""What the records of two cases show: which samples each step got, and how the first gradients
differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tools.prove.records import CaseRecords

SAMPLER = "a wrong sampler"
VALUES = "samples whose values depend on the ranks"
EITHER = "different samples or different values"
BATCH = "the batch size"

USE_LOADER = (
    "Use run.loader, which splits each global batch. With a DataLoader of your own, use DistributedSampler, with the "
    "same seed on all ranks."
)
KEY_THE_VALUES = (
    "In most scripts, this is an augmentation: let each sample's random numbers depend on the sample, not on the rank "
    "or on what was drawn before. run.loader seeds each item from (seed, epoch, index), for torch's, NumPy's and "
    "Python's global generators in the dataset. What the loop draws or computes for a whole batch, such as its "
    "mean, differs between ranks."
)


Row = Sequence[Sequence[int]]  # the columns of a sample, as the recorder writes them


@dataclass(frozen=True)
class Cause:
    """A cause of a failed proof: its name, what shows it, and what to do about it."""

    name: str
    evidence: str
    fix: str


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


@dataclass(frozen=True)
class SampleEvidence:
    """What is known about the samples of two cases."""

    cause: Cause | None = None  # the first step that differs
    step: int = 0  # which one it is
    knows_samples: bool = False  # the same samples in every step before that
    knows_values: bool = False  # and the same values

    def __str__(self) -> str:
        """Say what the two have in common, for steps before the cause, and what was not recorded."""
        when = f"Before step {self.step}, the" if self.cause is not None else "The"
        if self.knows_values:
            return f"{when} ranks get the same samples, with the same values."
        if self.knows_samples:
            return f"{when} ranks get the same samples; their values were not recorded."
        return "Which samples the ranks get was not recorded."


class SampleComparison:
    """Compares the samples of two cases, step by step."""

    def __init__(self, reference: CaseRecords, other: CaseRecords) -> None:
        self.reference, self.other = reference, other
        self.keys = ValueKeys(reference, other)
        self.steps = sorted(set(reference.first.steps) & set(other.first.steps))

    def compare(self) -> SampleEvidence:
        if not self.steps:
            return SampleEvidence()
        samples = values = True
        for step in self.steps:
            cause = self._batch_size(step) if step == self.steps[0] else None
            cause = cause or self._step_cause(step)
            if cause is not None:
                is_later = step != self.steps[0]
                return SampleEvidence(cause, step, samples and is_later, values and is_later)
            values = values and self._values_agree(step) is True
            samples = samples and (
                self._values_agree(step) is True or self._numbers_agree(step) is True
            )
        return SampleEvidence(knows_samples=samples, knows_values=values)

    def _numbers_agree(self, step: int) -> bool | None:
        """Compare the samples' numbers; None if they are not known, or if each rank numbers its own samples."""
        one, two = (each.together(step, "samples") for each in (self.reference, self.other))
        if one is None or two is None or self._has_own_numbers(step):
            return None
        return Counter(map(str, one)) == Counter(map(str, two))

    def _values_agree(self, step: int) -> bool | None:
        one, two = (self.keys.count(each, step) for each in (self.reference, self.other))
        return None if one is None or two is None else one == two

    def _has_own_numbers(self, step: int) -> bool:
        """Return whether ranks have the same numbers, but not the same samples, as with a dataset for each rank."""
        records = [rank.steps.get(step, {}) for rank in self.other.ranks]
        numbers = [each.get("samples") for each in records]
        if len(numbers) < 2 or any(each != numbers[0] for each in numbers):
            return False
        values = [self.keys.of(each.get("contents")) for each in records]
        return values[0] is None or any(each != values[0] for each in values)

    # -- causes ----------------------------------------------------------------------------------------

    def _batch_size(self, step: int) -> Cause | None:
        one, two = (
            sum(each.together(step, "rows") or [0]) for each in (self.reference, self.other)
        )
        ratio = self.other.case.ranks / self.reference.case.ranks
        if (
            ratio == 1
            or not one
            or two != one * ratio
            or self._is_repeated(step)
            or self._repeats_between_ranks()
        ):
            return None
        return Cause(
            BATCH,
            f"A step has {two} samples with {self.other.case.ranks} ranks and {one} with {self.reference.case.ranks}: "
            "each rank takes a whole batch.",
            "Use run.loader, whose batch size counts all ranks. For a script that takes the batch size per rank, name "
            "its option: --batch-arg --batch-size.",
        )

    def _step_cause(self, step: int) -> Cause | None:
        values, numbers = self._values_agree(step), self._numbers_agree(step)
        if values or (values is None and numbers is not False):
            return None
        if numbers is False:
            return self._wrong_sampler(step)
        return self._other_values(step) if numbers else self._unknown_samples(step)

    def _other_values(self, step: int) -> Cause:
        one, two = (
            self.keys.count(each, step) or Counter() for each in (self.reference, self.other)
        )
        return Cause(
            VALUES,
            f"Step {step} has the same samples with {self.other.case.ranks} ranks as with {self.reference.case.ranks}, "
            f"but {(two - one).total()} of {two.total()} reach the model with different values.",
            KEY_THE_VALUES,
        )

    def _wrong_sampler(self, step: int) -> Cause:
        ranks, before = self.other.case.ranks, self.reference.case.ranks
        one, two = (each.together(step, "samples") or [] for each in (self.reference, self.other))
        if self._is_repeated(step):
            what = self._not_split(step, len(two))
        elif repeated := self._repeats_between_ranks():
            what = (
                f"In step {step}, {ranks} ranks have different samples from {before}. In the first epoch, {repeated} "
                "samples go to several ranks: each rank draws from all of the data by itself."
            )
        elif len(one) != len(two):
            why = "the global batch depends on the ranks"
            if step != self.steps[0]:
                why = "the end of an epoch is dropped or padded"
            what = f"Step {step} has {len(two)} samples with {ranks} ranks, and {len(one)} with {before}: {why}."
        else:
            missing = (Counter(map(str, one)) - Counter(map(str, two))).total()
            what = (
                f"In step {step}, {missing} of {len(one)} samples differ between {ranks} ranks and {before}: the order "
                "of the data depends on the number of ranks."
            )
        return Cause(SAMPLER, what, USE_LOADER)

    def _not_split(self, step: int, count: int) -> str:
        ranks = self.other.case.ranks
        return f"In step {step}, all {ranks} ranks have the same {count // ranks} samples: the data is not split."

    def _unknown_samples(self, step: int) -> Cause:
        """Without the numbers of samples, tell other samples from other values by whether any of them ever match."""
        ranks, before = self.other.case.ranks, self.reference.case.ranks
        two = self.other.together(step, "contents") or []
        if self._is_repeated(step):
            return Cause(SAMPLER, self._not_split(step, len(two)), USE_LOADER)
        what = f"In step {step}, {ranks} ranks have different samples from {before}."
        if repeated := self._repeats_between_ranks():
            what += f" {repeated} samples go to several ranks: each rank draws from all of the data by itself."
            return Cause(SAMPLER, what, USE_LOADER)
        every = [
            {key for step in self.steps for key in self.keys.count(each, step) or ()}
            for each in (self.reference, self.other)
        ]
        if shared := len(every[0] & every[1]):
            return Cause(
                SAMPLER,
                f"{what} {shared} samples appear in both runs, but in different steps.",
                USE_LOADER,
            )
        return Cause(
            EITHER,
            f"In step {step}, the samples have different values with {ranks} ranks than with {before}, and no sample "
            f"of the first {len(self.steps)} steps appears in both runs. The samples have no numbers, so Paceline "
            "cannot tell whether they are different samples or the same ones with different values.",
            f"{USE_LOADER} {KEY_THE_VALUES}",
        )

    # -- samples of several ranks ----------------------------------------------------------------------

    def _own_keys(self, step: int) -> list[Sequence[Hashable]]:
        """Return the samples of each rank: their values, or else their numbers."""
        records = [rank.steps.get(step, {}) for rank in self.other.ranks]
        if all(each.get("contents") is not None for each in records):
            return [self.keys.of(each["contents"]) or [] for each in records]
        return [[str(number) for number in each.get("samples") or ()] for each in records]

    def _is_repeated(self, step: int) -> bool:
        """Return whether all ranks have the same samples."""
        lists = self._own_keys(step)
        return len(lists) > 1 and bool(lists[0]) and all(each == lists[0] for each in lists)

    def _repeats_between_ranks(self) -> int:
        """Return how many samples several ranks have had before any rank has had one twice."""
        seen: list[set[Hashable]] = [set() for _ in self.other.ranks]
        for step in self.steps:
            for keys, own in zip(self._own_keys(step), seen, strict=True):
                if any(key in own for key in keys):
                    return _count_shared(seen)
                own.update(keys)
        return _count_shared(seen)


def _count_shared(seen: Sequence[set[Hashable]]) -> int:
    return sum(count > 1 for count in Counter(key for each in seen for key in each).values())


# Up to rounding; single precision may use TF32.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
# Gradients that are zero but for rounding, such as those of a bias before BatchNorm, are compared with all the others.
SMALL = 1e-2

SPLIT_LOSS = "a loss that depends on the split of the batch"
RATE = "the learning rate"

# The factors of gradients and of losses, as powers of the number of ranks, and what they show.
SCALES = {
    (-1, -1): (
        "an unscaled sum",
        "DDP averages gradients over ranks, so each rank's loss has to be the mean over its own samples: "
        'use reduction="mean", or run.backward(loss_sum, weight=n), which divides by the global count.',
    ),
    (1, 1): (
        "a loss that is multiplied by the number of ranks",
        "DDP averages gradients over ranks: the loss needs no factor.",
    ),
    (1, 0): (
        "gradients that are summed over the ranks",
        "Divide them by the number of ranks, or let DDP do it.",
    ),
    (-1, 0): (
        "gradients that are divided twice",
        "DDP divides them by the number of ranks already: do not divide them again.",
    ),
}


class GradientComparison:
    """The first gradients that are not zero, and the losses of that step."""

    def __init__(self, reference: CaseRecords, other: CaseRecords) -> None:
        self.reference, self.other = reference, other
        self.tolerance = TOLERANCES.get(reference.dtype, TOLERANCES["float32"])
        self.step = _first_step(reference)
        self.one = reference.first.steps.get(self.step, {})
        self.two = other.first.steps.get(self.step, {})
        if _first_step(other) != self.step:
            self.step = 0

    @property
    def is_known(self) -> bool:
        return self.step > 0

    @property
    def agrees(self) -> bool:
        return self.is_known and self._are_multiples(1.0)

    def cause(self) -> Cause | None:
        """Return what explains gradients that differ; None if they agree, or if nothing that is known does."""
        if not self.is_known or self.agrees:
            return None
        return self._scale() or self._split_loss()

    def __str__(self) -> str:
        """Say what was measured."""
        if not self.is_known:
            return "No gradients were recorded that could be compared."
        if self.agrees:
            return f"The gradients of step {self.step} agree."
        return (
            f"The gradients of step {self.step} differ: their norm is {self.two['norm']:.6g} with "
            f"{self.other.ranks_text} and {self.one['norm']:.6g} with {self.reference.ranks_text}. "
            + self._losses_text()
        )

    # -- causes ----------------------------------------------------------------------------------------

    def _scale(self) -> Cause | None:
        ratio = self.other.case.ranks / self.reference.case.ranks
        power = next((power for power in (-1, 1) if self._are_multiples(ratio**power)), None)
        if power is None:
            return None
        losses = next((each for each in (-1, 0, 1) if self._loss_is_multiple(ratio**each)), None)
        name, fix = SCALES.get(
            (power, losses if losses is not None else 9), ("the scale of the gradients", "")
        )
        how = "smaller" if power * (ratio - 1) < 0 else "larger"
        return Cause(
            name,
            f"In step {self.step}, with equal weights and samples, all gradients are {max(ratio, 1 / ratio):g} times "
            f"{how} with {self.other.ranks_text} than with {self.reference.ranks_text}. {self._losses_text()}",
            fix
            or "Look for a factor of the gradients, or of the loss, that depends on the number of ranks.",
        )

    def _split_loss(self) -> Cause | None:
        if self._loss_is_multiple(1.0) is not False:
            return None
        return Cause(
            SPLIT_LOSS,
            f"In step {self.step}, with equal weights and samples, the gradients differ, and not by a common factor. "
            f"{self._losses_text()}",
            "If the loss is a mean over tokens, or over anything else that ranks have different numbers of, pass its "
            "sum and the count: run.backward(loss_sum, weight=n). A loss that compares the samples of a batch sees "
            "only those of its own rank. So do statistics of a batch, and random numbers from a generator of its own.",
        )

    # -- numbers ---------------------------------------------------------------------------------------

    def _are_multiples(self, factor: float) -> bool:
        """Return whether each gradient is `factor` times that of the reference."""
        one, two = self.one["gradient"], self.two["gradient"]
        if len(one) != len(two):
            return False
        total = max(factor * self.one["norm"], self.two["norm"])
        return all(
            abs(b - factor * a) <= self.tolerance * max(norm_b, factor * norm_a, SMALL * total)
            for (a, norm_a), (b, norm_b) in zip(one, two, strict=True)
        )

    def _losses(self) -> tuple[float, float] | None:
        found = [each.backward_losses().get(self.step) for each in (self.reference, self.other)]
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def _loss_is_multiple(self, factor: float) -> bool | None:
        losses = self._losses()
        if losses is None:
            return None
        one, two = factor * losses[0], losses[1]
        return abs(two - one) <= self.tolerance * max(abs(one), abs(two))

    def _losses_text(self) -> str:
        losses = self._losses()
        if losses is None:
            return "The losses of backward() were not recorded."
        if self._loss_is_multiple(1.0):
            return f"The losses agree ({losses[0]:.6g})."
        return (
            f"The mean of the ranks' losses is {losses[1]:.6g} with {self.other.ranks_text}, and {losses[0]:.6g} with "
            f"{self.reference.ranks_text}."
        )


def find_rate_cause(reference: CaseRecords, other: CaseRecords) -> Cause | None:
    """Return the first step with another learning rate, as a cause."""
    for step in sorted(set(reference.first.steps) & set(other.first.steps)):
        one, two = reference.first.steps[step]["rates"], other.first.steps[step]["rates"]
        pair = next(
            (
                (a, b)
                for a, b in zip(one, two, strict=False)
                if abs(a - b) > 1e-9 * max(abs(a), abs(b))
            ),
            None,
        )
        if pair is not None:
            return Cause(
                RATE,
                f"The learning rate in step {step} is {pair[1]:.6g} with {other.ranks_text} and {pair[0]:.6g} with "
                f"{reference.ranks_text}. The gradients of the first step agree.",
                "At an equal global batch the learning rate stays the same: scale it by the global batch, as "
                "run.scale_lr(opt, batch=..., reference=...) does, and count steps of the schedule as steps of the "
                "optimizer.",
            )
    return None


def _first_step(records: CaseRecords) -> int:
    """Return the first step whose gradients are recorded: those before it are zero. 0 if there is none."""
    return min(
        (step for step, record in records.first.steps.items() if record.get("gradient")), default=0
    )


def all_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)
