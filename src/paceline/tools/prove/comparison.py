"""How much the losses and the final weights of two cases differ, and how much they may."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.tools.prove.evidence import BATCH, SAMPLER, SampleComparison
from paceline.tools.prove.records import CaseRecords

# Rounding alone stays far below these in a few dozen steps; a mistake in the training is far above.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

# Of the first gradients. Weights that hardly move, as in a warm-up, stay close whatever the gradients are.
GRADIENT_TOLERANCE = 0.05

ROUNDING = 1e-8  # gradients below this are zero, but for rounding

# Of the distance between the final weights, as a share of the way that they have moved. Adam divides gradients by their
# size, so those that are almost zero move weights by their rounding.
SHARES = {"float64": 1e-4, "float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}

# Losses that are all smaller than 1 are compared relative to their size, but not to less than this: rounding.
SMALLEST_SCALES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}

LOGGED, BACKWARD, FILE = "run.log", "backward()", "file"


@dataclass(frozen=True)
class LossSource:
    """Where the losses come from: the same for all cases."""

    kind: str
    name: str

    def curve(self, records: CaseRecords) -> dict[int, float]:
        if self.kind == BACKWARD:
            return records.backward_losses()
        return records.logged.get(self.name, {})

    def __str__(self) -> str:
        if self.kind == BACKWARD:
            return "the loss of backward(), averaged over the ranks"
        return f"{self.name!r} of {'run.log' if self.kind == LOGGED else 'the metrics file'}"


def choose_source(records: CaseRecords, metric: str | None, *, has_file: bool) -> LossSource | None:
    """Return what shows the loss of the whole batch best; None if nothing does, or nothing has the name `metric`.

    What a script prints does not count: usually, that is the loss of rank 0's own samples.
    """
    name = metric or "loss"
    if name in records.logged:
        return LossSource(FILE if has_file else LOGGED, name)
    is_passed = metric is None and not has_file and records.backward_losses()
    return LossSource(BACKWARD, name) if is_passed else None


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
    note: str = ""  # what keeps the two from being compared

    @property
    def agrees(self) -> bool:
        return (
            not self.note
            and self.loss <= self.limit
            and (self.weights is None or self.weights <= self.limit)
        )


def tolerance(records: CaseRecords) -> float:
    return TOLERANCES.get(records.dtype, TOLERANCES["float32"])


def compare(
    records: CaseRecords, against: CaseRecords, source: LossSource, *, limit: float
) -> Comparison:
    one, other = source.curve(records), source.curve(against)
    loss, step = largest_difference(one, other, scale=loss_scale(other, against.dtype))
    found = records.first.end.get("differences", {}).get(against.case.name, {})
    note = records.note or found.get("error", "")
    if not note and len(one) != len(other):
        note = f"{len(one)} losses, but {len(other)} with {against.case.name}"
    note = (
        note
        or compare_replicas(records)
        or compare_replicas(against)
        or compare_samples(records, against)
    )
    note = note or compare_gradients(records, against) or _compare_movement(found, against, limit)
    note = note or compare_modules(records, against)
    return Comparison(
        records.case.name,
        against.case.name,
        limit,
        loss,
        step,
        found.get("difference"),
        found.get("parameter", ""),
        note,
    )


def compare_replicas(records: CaseRecords) -> str:
    """Return how the final weights of the ranks differ; empty if they agree, or if the ranks share a model."""
    ends = [rank.end for rank in records.ranks if rank.end]
    if any(end.get("shapes") != ends[0].get("shapes") for end in ends):
        return ""
    count = len({end.get("weights") for end in ends})
    return (
        f"the {records.ranks_text} end with {count} different sets of weights" if count > 1 else ""
    )


def compare_modules(records: CaseRecords, against: CaseRecords) -> str:
    """Return which modules have another state at the end, of runs that have to be equal bit for bit.

    At other numbers of ranks, statistics of BatchNorm are others. Checkpoints have those of rank 0.
    """
    if records.case.ranks != against.case.ranks:
        return ""
    ones, others = (each.first.end.get("modules", {}) for each in (records, against))
    for kind in sorted(ones.keys() & others.keys()):
        # One more or less of a kind may be left from an evaluation.
        if len(ones[kind]) == len(others[kind]) and ones[kind] != others[kind]:
            return f"parameters or buffers of a {kind.split()[0]} differ at the end"
    return ""


def compare_samples(records: CaseRecords, against: CaseRecords) -> str:
    """Return from which step on other samples are trained on at another number of ranks.

    Other values of the same samples do not count here: rounding may be all of it, and if not, the losses differ.
    """
    if records.case.ranks == against.case.ranks:
        return ""
    found = SampleComparison(against, records).compare()
    if found.cause is None or found.cause.name not in (SAMPLER, BATCH):
        return ""
    return f"different samples than with {against.case.name} from step {found.step} on"


def _compare_movement(found: Mapping[str, Any], against: CaseRecords, limit: float) -> str:
    share = float(found.get("share", 0.0))
    if share <= max(limit, SHARES.get(against.dtype, SHARES["float32"])):
        return ""
    return f"the weights differ by {share:.2g} times the distance that they moved"


def compare_gradients(records: CaseRecords, against: CaseRecords) -> str:
    """Return how the gradients of the first step differ; empty if they agree, or if one was not recorded."""
    first = min(records.first.steps, default=0)
    (one, clipped), (other, other_clipped) = (
        _gradient_norm(each, first) for each in (records, against)
    )
    if clipped != other_clipped:  # before clipping, or after it
        return ""
    if one is None or other is None or max(one, other) < ROUNDING:
        return ""
    if abs(one - other) <= GRADIENT_TOLERANCE * max(one, other):
        return ""
    return f"gradients of norm {one:.4g} in step {first}, but {other:.4g} with {against.case.name}"


def _gradient_norm(records: CaseRecords, step: int) -> tuple[float | None, bool]:
    """Return the norm with which the optimizer steps, or that before clipping, and whether it is the latter."""
    steps = [rank.steps.get(step, {}) for rank in records.ranks]
    sizes = [(each.get("clip") or {}).get("size") for each in steps]
    found, is_clipped = (
        steps[0].get("norm"),
        sizes[0] is not None and all(size == sizes[0] for size in sizes),
    )
    if is_clipped:
        found = sizes[0]
    return None if found is None else abs(float(found)), is_clipped


def loss_scale(losses: Mapping[int, float], dtype: str) -> float:
    """Return the size to which differences of losses are relative, if they are smaller than 1."""
    largest = max((abs(each) for each in losses.values() if math.isfinite(each)), default=1.0)
    return min(1.0, max(largest, SMALLEST_SCALES.get(dtype, SMALLEST_SCALES["float32"])))


def largest_difference(
    one: Mapping[int, float], other: Mapping[int, float], *, scale: float = 1.0
) -> tuple[float, int]:
    """Return the largest difference in a common step, relative to the scale or to a larger loss, and the step."""
    largest, where = 0.0, 0
    for step in sorted(one.keys() & other.keys()):
        found = relative(one[step], other[step], scale)
        if not found <= largest:  # NaN is the largest of all
            largest, where = found, step
    return largest, where


def relative(one: float, other: float, scale: float = 1.0) -> float:
    if math.isnan(one) and math.isnan(other):
        return 0.0
    return abs(one - other) / max(scale, abs(other))
