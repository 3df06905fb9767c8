"""What broke a proof: causes that the records of the ranks show, and that runs without dropout and
BatchNorm confirm.

The causes are tried in the order in which they act: what differs at the start, which samples a step
gets, what is in them, what the model draws or computes per rank, how the loss is scaled. Later ones
count only if nothing earlier explains the difference: other samples give other gradients, too. If
nothing does, the cause is unknown, and what was measured is all there is to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.contract.rank_records import BATCHNORM, DRAWS, DROPOUT
from paceline.tools.prove import causes
from paceline.tools.prove.causes import MODEL_CAUSES, Cause
from paceline.tools.prove.comparison import (
    compare,
    count_replicas,
    find_other_rate,
    largest_difference,
)
from paceline.tools.prove.records import CaseRecords
from paceline.tools.prove.samples import SampleComparison, SampleEvidence

# Runs the reference with this number of ranks and these changes; or with True, to repeat it.
Rerun = Callable[[int, Sequence[str], bool], CaseRecords]

WITHOUT = {
    DROPOUT: "dropout turned off",
    BATCHNORM: "each sample normalized by itself instead of BatchNorm",
}
# Of gradients, up to rounding; single precision may use TF32.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
# Gradients that are zero but for rounding, such as those of a bias before BatchNorm, are compared
# with all the others.
SMALL = 1e-2
# What the factors of gradients and of losses show, as powers of the number of ranks.
SCALES = {
    (-1, -1): causes.SUM,
    (1, 1): causes.TIMES_RANKS,
    (1, 0): causes.SUMMED,
    (-1, 0): causes.DIVIDED,
}


class Diagnosis:
    """Finds out why a case differs from the reference."""

    def __init__(
        self,
        reference: CaseRecords,
        other: CaseRecords,
        *,
        limit: float,
        rerun: Rerun,
        is_reproducible: bool,
    ) -> None:
        self.reference, self.other, self.limit = reference, other, limit
        self.is_reproducible = is_reproducible  # whether equal runs are known to be equal
        self._rerun = rerun
        self._samples = SampleEvidence()

    def causes(self) -> list[Cause]:
        one, other = self.reference, self.other
        if one.case.ranks == other.case.ranks:
            return [self._replicas() or _explain_equal_runs(one, other)]
        if not self.is_reproducible:
            again = self._rerun(one.case.ranks, (), True)
            if not compare(again, one, limit=0.0).agrees:
                return [_explain_equal_runs(one, again)]
        if one.first.start.get("weights") != other.first.start.get("weights"):
            what = f"with {other.ranks_text} than with {one.ranks_text}"
            evidence = f"Before the first step, rank 0 has different weights {what}."
            return [Cause(causes.INITIAL, evidence)]
        self._samples = SampleComparison(one, other).compare()
        late = [] if self._samples.cause is None else [self._samples.cause]
        if late and self._agree(one, other):
            return late
        found = self._replicas()
        return [*([found] if found is not None else self._model_causes()), *late]

    # -- before the first gradient
    # ------------------------------------------------------------------------------

    def _replicas(self) -> Cause | None:
        """Compare the weights of the ranks of one run."""
        case = next((each for each in (self.other, self.reference) if count_replicas(each)), None)
        if case is None:
            return None
        what = f"The {case.ranks_text} end with {count_replicas(case)} different sets of weights."
        if len({rank.start.get("weights") for rank in case.ranks}) > 1:
            return Cause(causes.INITIAL, f"{what} They already differ before the first step.")
        norms = [rank.steps[min(rank.steps)]["norm"] for rank in case.ranks if rank.steps]
        if len(set(norms)) > 1:
            shown = ", ".join(f"{each:.4g}" for each in norms)
            return Cause(
                causes.NOT_AVERAGED,
                f"{what} In their first step, they use gradients of different norms ({shown}).",
            )
        return Cause(
            causes.UNKNOWN,
            f"{what} They start with the same weights, and their first gradients have the same "
            "norm.",
        )

    # -- what the model does
    # ------------------------------------------------------------------------------------

    def _model_causes(self) -> list[Cause]:
        """Run both again without what depends on the rank. What is then left has another cause."""
        one, other = self.reference, self.other
        used = (one.uses | other.uses) - set(other.case.without)
        suspects = [each for each in MODEL_CAUSES if each in used]
        if not suspects:
            return [self._rest(one, other)]
        one = self._rerun(one.case.ranks, suspects, False)
        other = self._rerun(other.case.ranks, suspects, False)
        before, _ = largest_difference(self.other, self.reference)
        after, _ = largest_difference(other, one)
        how = " and ".join(WITHOUT[each] for each in suspects)
        evidence = (
            f"{self._samples} With {how}, {other.ranks_text} and {one.ranks_text} differ by "
            f"{after:.2g} in the loss instead of {before:.2g}."
        )
        found = [Cause(MODEL_CAUSES[each], evidence) for each in suspects]
        return found if self._agree(one, other) else [*found, self._rest(one, other)]

    def _agree(self, one: CaseRecords, other: CaseRecords) -> bool:
        """Return whether two cases agree: in all, or before one of them gets other samples."""
        if self._samples.step:
            loss, _ = largest_difference(other, one, before=self._samples.step)
            return loss <= self.limit
        return compare(other, one, limit=self.limit).agrees

    def _rest(self, one: CaseRecords, other: CaseRecords) -> Cause:
        """Find what the first gradients and the learning rates show."""
        gradients = GradientComparison(one, other)
        known = self._samples.knows_samples and gradients.is_known and not gradients.agrees
        if known and (scale := gradients.find_scale()):
            return scale
        rate = find_other_rate(other, one)
        if rate is not None and gradients.agrees:
            return Cause(
                causes.RATE,
                f"The learning rate in step {rate[0]} is {rate[1]:.6g} with {other.ranks_text} and "
                f"{rate[2]:.6g} with {one.ranks_text}. The gradients of the first step agree.",
            )
        if DRAWS in one.uses | other.uses:
            return Cause(
                causes.DRAWN,
                f"{self._samples} Between the call of the model and backward(), the script draws "
                f"random numbers, and each rank draws its own. {gradients}",
            )
        if known and not gradients.has_loss_times(1.0):
            return Cause(
                causes.SPLIT,
                f"{gradients} The weights and samples are equal, and no common factor explains it.",
            )
        loss, step = largest_difference(other, one)
        return Cause(
            causes.UNKNOWN,
            f"{self._samples} The initial weights agree. {gradients} The losses differ by up to "
            f"{loss:.2g} (step {step}).",
        )


def _explain_equal_runs(one: CaseRecords, other: CaseRecords) -> Cause:
    """Say how two runs differ that should be equal."""
    found = compare(other, one, limit=0.0)
    what = found.note or "the final weights differ"
    if found.loss:
        what = f"the losses differ, most in step {found.loss_step}"
    evidence = f"{other.case.name} and {one.case.name}: {what}."
    if other.case.interrupted:
        samples = SampleComparison(one, other).compare()
        evidence += f" It stopped after step {other.stopped_after}. "
        evidence += samples.cause.evidence if samples.cause else str(samples)
        return Cause(causes.RESUME, evidence)
    if one.first.start.get("seed") != other.first.start.get("seed"):
        return Cause(causes.SEED, f"{evidence} torch has a different seed in each of them.")
    return Cause(causes.UNSTABLE, f"{evidence} torch has the same seed in both.")


class GradientComparison:
    """The first gradients that are not zero, and the losses of that step."""

    def __init__(self, reference: CaseRecords, other: CaseRecords) -> None:
        self.reference, self.other = reference, other
        self.tolerance = TOLERANCES.get(reference.dtype, TOLERANCES["float32"])
        self.step = _first_step(reference)
        has_losses = self.step in reference.losses.keys() & other.losses.keys()
        self.is_known = has_losses and _first_step(other) == self.step
        self.agrees = self.is_known and self._are_multiples(1.0)

    def __str__(self) -> str:
        """Say what was measured."""
        if not self.is_known:
            return "No gradients were recorded that could be compared."
        if self.agrees:
            return f"The gradients of step {self.step} agree."
        one, two = (each.first.steps[self.step]["norm"] for each in (self.reference, self.other))
        return (
            f"The gradients of step {self.step} differ: their norm is {two:.6g} with "
            f"{self.other.ranks_text} and {one:.6g} with {self.reference.ranks_text}. "
            f"{self._describe_losses()}"
        )

    def find_scale(self) -> Cause | None:
        """Return the cause if all gradients differ by the same factor."""
        ratio = self.other.case.ranks / self.reference.case.ranks
        for power in (-1, 1):
            if self._are_multiples(ratio**power):
                losses = (each for each in (-1, 0, 1) if self.has_loss_times(ratio**each))
                how = "smaller" if power * (ratio - 1) < 0 else "larger"
                return Cause(
                    SCALES.get((power, next(losses, 2)), causes.SCALE),
                    f"In step {self.step}, with equal weights and samples, all gradients are "
                    f"{max(ratio, 1 / ratio):g} times {how} with {self.other.ranks_text} than with "
                    f"{self.reference.ranks_text}. {self._describe_losses()}",
                )
        return None

    def _are_multiples(self, factor: float) -> bool:
        """Return whether each gradient is `factor` times that of the reference."""
        one, two = (each.first.steps[self.step] for each in (self.reference, self.other))
        smallest = SMALL * max(factor * one["norm"], two["norm"])
        one, two = one["gradient"], two["gradient"]
        if len(one["norms"]) != len(two["norms"]):
            return False
        for a, b, norm_a, norm_b in zip(
            one["projections"], two["projections"], one["norms"], two["norms"], strict=True
        ):
            size = max(norm_b, factor * norm_a, smallest)
            if not abs(b - factor * a) <= self.tolerance * size:
                return False
        return True

    def has_loss_times(self, factor: float) -> bool:
        """Return whether the loss is `factor` times that of the reference."""
        one, two = self.reference.losses[self.step], self.other.losses[self.step]
        return abs(two - factor * one) <= self.tolerance * max(abs(factor * one), abs(two))

    def _describe_losses(self) -> str:
        one, two = self.reference.losses[self.step], self.other.losses[self.step]
        if self.has_loss_times(1.0):
            return f"The losses agree ({one:.6g})."
        return (
            f"The mean of the ranks' losses is {two:.6g} with {self.other.ranks_text}, and "
            f"{one:.6g} with {self.reference.ranks_text}."
        )


def _first_step(records: CaseRecords) -> int:
    """Return the first step whose gradients are recorded: those before it are zero. 0 if there is
    none.
    """
    steps = records.first.steps
    return min((step for step, record in steps.items() if record.get("gradient")), default=0)
