"""Which samples each step got at two numbers of ranks, and whether they were the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.proof.cause import Cause
from paceline.proof.records import CaseRecords

SAMPLER = "a wrong sampler"
AUGMENTATION = "unkeyed augmentation"
BATCH = "the batch size"


def find_sample_cause(reference: CaseRecords, other: CaseRecords) -> Cause | None:
    """Return the first step whose samples differ, as a cause; None if all are the same, as far as is known."""
    steps = sorted(set(reference.first.steps) & set(other.first.steps))
    if not steps:
        return None
    found = _batch_size(reference, other, steps[0])
    for step in steps:
        if found is not None:
            return found
        found = _compare_step(reference, other, step)
    return found


def _batch_size(reference: CaseRecords, other: CaseRecords, step: int) -> Cause | None:
    one, two = (sum(each.together(step, "rows") or [0]) for each in (reference, other))
    ratio = other.case.ranks / reference.case.ranks
    if not one or two != one * ratio or _is_repeated(other, step) or _repeats_between_ranks(other):
        return None
    return Cause(
        BATCH,
        f"A step has {two} samples with {other.case.ranks} ranks and {one} with {reference.case.ranks}: each rank "
        "takes a whole batch.",
        "Use run.loader, whose batch size counts all ranks. For a script that takes the batch size per rank, name its "
        "option: --batch-arg --batch-size.",
    )


def _compare_step(reference: CaseRecords, other: CaseRecords, step: int) -> Cause | None:
    samples = [each.together(step, "samples") for each in (reference, other)]
    contents = [each.together(step, "contents") for each in (reference, other)]
    if samples[0] is not None and samples[1] is not None:
        if Counter(map(str, samples[0])) != Counter(map(str, samples[1])):
            return _wrong_sampler(reference, other, step)
    elif contents[0] is not None and contents[1] is not None and Counter(contents[0]) != Counter(contents[1]):
        return _unknown_samples(reference, other, step)
    if contents[0] is None or contents[1] is None:
        return None
    different = sum((Counter(contents[1]) - Counter(contents[0])).values())
    if not different:
        return None
    return Cause(
        AUGMENTATION,
        f"Step {step} has the same samples with {other.case.ranks} ranks as with {reference.case.ranks}, but "
        f"{different} of {len(contents[1])} reach the model with other values.",
        "Let each sample's random numbers depend on the sample, not on the rank or on what was drawn before: use "
        "run.loader, which seeds each item from (seed, epoch, index), with torch's, NumPy's or Python's global "
        "generators in the data set. What the loop draws for a whole batch differs between ranks.",
    )


def _is_repeated(records: CaseRecords, step: int) -> bool:
    """Return whether all ranks have the same samples."""
    lists = [_keys(rank.steps[step]) for rank in records.ranks if step in rank.steps]
    return len(lists) > 1 and bool(lists[0]) and all(each == lists[0] for each in lists)


def _keys(step: dict[str, Any]) -> Sequence[Any]:
    return step.get("samples") or step.get("contents") or []


def _wrong_sampler(reference: CaseRecords, other: CaseRecords, step: int) -> Cause:
    one, two = (each.together(step, "samples") or [] for each in (reference, other))
    ranks = other.case.ranks
    if _is_repeated(other, step):
        count = len(_keys(other.first.steps[step]))
        what = f"In step {step}, all {ranks} ranks have the same {count} samples: the data is not split."
    elif repeated := _repeats_between_ranks(other):
        what = (
            f"In step {step}, {ranks} ranks have other samples than {reference.case.ranks}. In the first epoch, "
            f"{repeated} samples go to several ranks: each rank shuffles all of the data by itself."
        )
    elif len(one) != len(two):
        what = (
            f"Step {step} has {len(two)} samples with {ranks} ranks, and {len(one)} with {reference.case.ranks}: the "
            "end of an epoch is dropped or filled up."
        )
    else:
        missing = sum((Counter(map(str, one)) - Counter(map(str, two))).values())
        what = (
            f"In step {step}, {missing} of {len(one)} samples are others with {ranks} ranks than with "
            f"{reference.case.ranks}: the order of the data depends on the number of ranks."
        )
    return Cause(
        SAMPLER,
        what,
        "Use run.loader, which splits each global batch. With a DataLoader of your own, use DistributedSampler, with "
        "the same seed on all ranks.",
    )


def _repeats_between_ranks(records: CaseRecords) -> int:
    """Return how many samples several ranks have had before any rank has had one twice."""
    seen: list[set[str]] = [set() for _ in records.ranks]
    for step in sorted(records.first.steps):
        for rank, own in zip(records.ranks, seen, strict=True):
            keys = [str(key) for key in _keys(rank.steps.get(step, {}))]
            if any(key in own for key in keys):
                return sum(count > 1 for count in Counter(key for each in seen for key in each).values())
            own.update(keys)
    return sum(count > 1 for count in Counter(key for each in seen for key in each).values())


def _unknown_samples(reference: CaseRecords, other: CaseRecords, step: int) -> Cause:
    """Without the numbers of samples, tell other samples from other values by whether any of them ever match."""
    every = [
        {key for rank in each.ranks for record in rank.steps.values() for key in record["contents"]}
        for each in (reference, other)
    ]
    shared = len(every[0] & every[1])
    if _is_repeated(other, step) or shared:
        found = _wrong_sampler(reference, other, step)
        if _is_repeated(other, step) or _repeats_between_ranks(other):
            return found
        what = f"In step {step}, {other.case.ranks} ranks have other samples than {reference.case.ranks}."
        return Cause(SAMPLER, f"{what} {shared} samples appear in both runs, in other steps.", found.fix)
    return Cause(
        AUGMENTATION,
        f"In step {step}, the samples have other values with {other.case.ranks} ranks than with "
        f"{reference.case.ranks}, and no sample of the first {len(reference.first.steps)} steps appears in both runs.",
        "Let each sample's random numbers depend on the sample, and not on the rank: use run.loader.",
    )
