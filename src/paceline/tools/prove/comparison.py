"""How much the losses and the final weights of two cases differ, and how much they may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.tools.prove.causes import BATCH, SAMPLER
from paceline.tools.prove.records import CaseRecords
from paceline.tools.prove.samples import SampleComparison

# Rounding alone stays far below these in a few dozen steps; a mistake in the training is far above.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

# Of the norm of the gradients in each step, as a share of the largest, and as a multiple of what is
# allowed. Weights that hardly move, as in a warm-up, stay close whatever the gradients are.
NORM_TOLERANCE, NORM_TOLERANCES = 0.05, 4.0
ROUNDING = 1e-8  # gradients below this are zero, but for rounding

# Losses that are all smaller than 1 are compared relative to their size, but not to less than this:
# rounding.
SMALLEST_SCALES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}


@dataclass(frozen=True)
class Comparison:
    """A case next to another one."""

    name: str
    against: str
    limit: float  # 0: bit for bit
    loss: float
    loss_step: int
    weights: float | None  # None if they were not recorded
    parameter: str = ""
    note: str = ""  # what differs besides

    @property
    def agrees(self) -> bool:
        return (
            not self.note
            and self.loss <= self.limit
            and (self.weights is None or self.weights <= self.limit)
        )


def compare(records: CaseRecords, against: CaseRecords, *, limit: float) -> Comparison:
    """Compare a case with one that had run before: its ranks have compared the weights."""
    loss, step = largest_difference(records, against)
    end = records.first.end
    return Comparison(
        records.case.name,
        against.case.name,
        limit,
        loss,
        step,
        end.get("difference"),
        end.get("parameter", ""),
        next(_find_differences(records, against, limit), ""),
    )


def _find_differences(records: CaseRecords, against: CaseRecords, limit: float) -> Iterator[str]:
    """Say what differs, besides losses and weights that may differ a little."""
    name = against.case.name
    if records.note:
        yield records.note
    if "error" in records.first.end:
        yield records.first.end["error"]
    if len(records.losses) != len(against.losses):
        yield f"{len(records.losses)} losses, but {len(against.losses)} with {name}"
    for each in (records, against):
        if count := count_replicas(each):
            yield f"the {each.ranks_text} end with {count} different sets of weights"
    if records.case.ranks == against.case.ranks:
        yield from find_other_modules(records, against)
    else:
        found = SampleComparison(against, records).compare()
        # Other values of the same samples may be rounding, and if not, the losses differ.
        if found.cause is not None and found.cause.name in (SAMPLER, BATCH):
            yield f"different samples than with {name} from step {found.step} on"
    yield from _find_other_norms(records, against, limit)
    if rate := find_other_rate(records, against):
        yield f"another learning rate than with {name} from step {rate[0]} on"


def count_replicas(records: CaseRecords) -> int:
    """Return how many different final weights the ranks have; 0 if they agree, or if each has a
    part of a model.
    """
    ends = [rank.end for rank in records.ranks if rank.end]
    if any(end["shapes"] != ends[0]["shapes"] for end in ends):
        return 0
    count = len({end["weights"] for end in ends})
    return count if count > 1 else 0


def find_other_modules(records: CaseRecords, against: CaseRecords) -> Iterator[str]:
    """Say which modules end with another state, for runs that have to be equal bit for bit.

    At other numbers of ranks, statistics of BatchNorm are others. Checkpoints have those of rank 0.
    """
    one, other = (each.first.end.get("modules", {}) for each in (records, against))
    for kind in sorted(one.keys() & other.keys()):
        # One more or less of a kind may be left from an evaluation.
        if len(one[kind]) == len(other[kind]) and one[kind] != other[kind]:
            yield f"parameters or buffers of a {kind.split()[0]} differ at the end"


def _find_other_norms(records: CaseRecords, against: CaseRecords, limit: float) -> Iterator[str]:
    one, other = (
        {step: record["norm"] for step, record in each.first.steps.items()}
        for each in (records, against)
    )
    largest = max([*one.values(), *other.values()], default=0.0)
    allowed = largest * max(NORM_TOLERANCE, NORM_TOLERANCES * limit)
    for step in sorted(one.keys() & other.keys()):
        if largest > ROUNDING and not abs(one[step] - other[step]) <= allowed:
            yield (
                f"gradients of norm {one[step]:.4g} in step {step}, but {other[step]:.4g} with "
                f"{against.case.name}"
            )


def find_other_rate(records: CaseRecords, against: CaseRecords) -> tuple[int, float, float] | None:
    """Return the first step with another learning rate, and both rates."""
    for step in sorted(records.first.steps.keys() & against.first.steps.keys()):
        rates = (each.first.steps[step]["rates"] for each in (records, against))
        for one, other in zip(*rates, strict=False):
            if not math.isclose(one, other, rel_tol=1e-9):
                return step, one, other
    return None


def largest_difference(
    records: CaseRecords, against: CaseRecords, *, before: float = math.inf
) -> tuple[float, int]:
    """Return the largest difference between the losses of a common step, and the step."""
    one, other = records.losses, against.losses
    scale = loss_scale(other, against.dtype)
    largest, where = 0.0, 0
    for step in sorted(one.keys() & other.keys()):
        found = relative(one[step], other[step], scale)
        if step < before and not found <= largest:  # NaN is the largest of all
            largest, where = found, step
    return largest, where


def loss_scale(losses: Mapping[int, float], dtype: str) -> float:
    """Return the size to which differences of losses are relative, if they are smaller than 1."""
    largest = max((abs(each) for each in losses.values() if math.isfinite(each)), default=1.0)
    return min(1.0, max(largest, SMALLEST_SCALES.get(dtype, SMALLEST_SCALES["float32"])))


def relative(one: float, other: float, scale: float = 1.0) -> float:
    if math.isnan(one) and math.isnan(other):
        return 0.0
    return abs(one - other) / max(scale, abs(other))
