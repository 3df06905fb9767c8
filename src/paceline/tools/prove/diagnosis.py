"""What broke a proof: causes that the records of the ranks show, and reruns with one thing changed confirm.

The causes are tried in the order in which they act: what differs at the start, which samples a step gets, what is in
them, what the model draws or computes per rank, how the loss is scaled. Later ones count only if nothing earlier
explains the difference: other samples give other gradients, too. If nothing does, the cause is unknown, and what was
measured is all there is to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.contract.rank_records import BATCHNORM, DRAWS, DROPOUT, OTHER_DRAWS
from paceline.tools.prove.comparison import (
    LossSource,
    compare,
    compare_gradients,
    compare_modules,
    compare_replicas,
    largest_difference,
    loss_scale,
    relative,
)
from paceline.tools.prove.evidence import (
    Cause,
    GradientComparison,
    SampleComparison,
    SampleEvidence,
    all_equal,
    find_rate_cause,
)
from paceline.tools.prove.records import CaseRecords

Rerun = Callable[[int, Sequence[str], int], CaseRecords]  # ranks, changes, repeat

UNKNOWN = "unknown"
SEED = "no fixed seed"
UNSTABLE = "equal runs that differ"
ON_GPUS = (
    "On GPUs, a script without the runtime also needs torch.use_deterministic_algorithms(True)."
)
FIXES = {
    DROPOUT: "This is expected: each rank draws its own dropout. To prove the rest, add --without dropout.",
    BATCHNORM: "Convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm (on GPUs), or use GroupNorm or "
    "LayerNorm. To prove the rest, add --without batchnorm.",
}
SHOWN = {
    DROPOUT: ("dropout", "with dropout turned off"),
    BATCHNORM: ("BatchNorm", "with statistics over all ranks instead of each rank's own"),
}


class Diagnosis:
    """Finds out why a case differs from the reference."""

    def __init__(
        self,
        reference: CaseRecords,
        other: CaseRecords,
        source: LossSource,
        *,
        limit: float,
        rerun: Rerun,
    ) -> None:
        self.reference, self.other, self.source, self.limit = reference, other, source, limit
        self.is_reproducible = False  # whether equal runs are known to be equal
        self._rerun = rerun
        self._evidence = SampleEvidence()
        self._scale = loss_scale(source.curve(reference), reference.dtype)

    def causes(self) -> list[Cause]:
        if self.reference.case.ranks == self.other.case.ranks:
            return [
                self._replicas()
                or self._unrepeated()
                or self._resume_cause()
                or self._style_cause()
            ]
        found = self._unrepeated() or self._initial_weights()
        if found is not None:
            return [found]
        self._evidence = SampleComparison(self.reference, self.other).compare()
        late = self._evidence.cause
        if late is not None and self._agree(self.reference, self.other, before=self._evidence.step):
            return [late]
        found = self._replicas()
        causes = [found] if found is not None else self._model_causes()
        return causes if late is None else [*causes, late]

    # -- before the first gradient ---------------------------------------------------------------------

    def _unrepeated(self) -> Cause | None:
        """Compare the reference with a repeat of itself."""
        if self.is_reproducible:
            return None
        again = self._rerun(self.reference.case.ranks, (), 1)
        return find_repeat_cause(self.reference, again, self.source)

    def _resume_cause(self) -> Cause | None:
        if not self.other.case.interrupted:
            return None
        found = SampleComparison(self.reference, self.other).compare()
        one, other = self.source.curve(self.reference), self.source.curve(self.other)
        first = next(
            (step for step in sorted(one.keys() & other.keys()) if one[step] != other[step]), 0
        )
        what = f"From step {first} on, the losses differ" if first else "The final weights differ"
        what = f"{what} from those without the interruption."
        state = compare_modules(self.other, self.reference)
        weights = compare(self.other, self.reference, self.source, limit=0.0).weights
        if state and not first and not weights:
            what = f"Losses and trained weights agree, but {state}."
        samples = found.cause.evidence if found.cause else found
        return Cause(
            "the resume",
            f"It stopped after step {self.other.stopped_after}. {what} {samples}",
            "Pass everything that changes during training to run.resume: schedulers, averages of weights, generators, "
            "your own counters. Let run.loader read the data.",
        )

    def _style_cause(self) -> Cause:
        return Cause(
            "the launch style",
            f"{self.other.case.name} and {self.reference.case.name} differ, although repeating the latter gives the "
            "same result.",
            "Look for what the script reads from its environment: variables, the working directory, numbers of "
            "threads.",
        )

    def _initial_weights(self) -> Cause | None:
        if self.reference.first.start.get("weights") == self.other.first.start.get("weights"):
            return None
        return Cause(
            "initial weights",
            f"Before the first step, rank 0 has different weights with {self.other.ranks_text} than with "
            f"{self.reference.ranks_text}.",
            "Build the model with the same seed at every number of ranks: do not add the rank, and do not draw random "
            "numbers for the data before it.",
        )

    def _replicas(self) -> Cause | None:
        """Compare the weights of the ranks of one run."""
        case = next((each for each in (self.other, self.reference) if compare_replicas(each)), None)
        if case is None:
            return None
        what = f"{compare_replicas(case).capitalize()}."
        first = [rank.steps[min(rank.steps)] for rank in case.ranks if rank.steps]
        if not all_equal([rank.start.get("weights") for rank in case.ranks]):
            return Cause(
                "initial weights",
                f"{what} They already differ before the first step.",
                "Wrap the model in DistributedDataParallel or run.wrap, which copy those of rank 0 to the others.",
            )
        if not all_equal([each["norm"] for each in first]):
            norms = ", ".join(f"{each['norm']:.4g}" for each in first)
            return Cause(
                "gradients that are not averaged",
                f"{what} In their first step, they use gradients of different norms ({norms}).",
                "Wrap the model in DistributedDataParallel or run.wrap, and build the optimizer from its parameters.",
            )
        return Cause(
            UNKNOWN,
            f"{what} They start with the same weights, and their first gradients have the same norm.",
            "Look for what differs between ranks during training: a learning rate, a condition, a step that some skip.",
        )

    # -- what the model does ---------------------------------------------------------------------------

    def _model_causes(self) -> list[Cause]:
        """Run both again without what depends on the rank. What makes the difference go away is the cause."""
        suspects = [
            each for each in (DROPOUT, BATCHNORM) if each in self.other.uses | self.reference.uses
        ]
        suspects = [each for each in suspects if each not in self.other.case.without]
        if not suspects:
            return [self._rest(self.reference, self.other)]
        pair = self._pair(suspects)
        if self._agree(*pair, before=self._evidence.step):
            # Each of several is a cause if the difference is still there without the others.
            several = suspects if len(suspects) > 1 else []
            counted = [
                each for each in several if not self._agree(*self._pair(_without(several, each)))
            ]
            return [self._model_cause(each, pair) for each in counted or suspects]
        # Something else differs, too. Each suspect counts if it changes the loss.
        counted = [each for each in suspects if self._changes_loss(each)]
        return [*(self._part(each) for each in counted), self._rest(*pair)]

    def _pair(self, changes: Sequence[str]) -> tuple[CaseRecords, CaseRecords]:
        reference = self._rerun(self.reference.case.ranks, changes, 0)
        return reference, self._rerun(self.other.case.ranks, changes, 0)

    def _agree(self, reference: CaseRecords, other: CaseRecords, *, before: int = 0) -> bool:
        """Return whether two cases agree: in all, or in the steps before one of them gets other samples."""
        if not before:
            return compare(other, reference, self.source, limit=self.limit).agrees
        if before <= min(reference.first.steps):
            return True
        one, two = (
            {step: loss for step, loss in self.source.curve(each).items() if step < before}
            for each in (reference, other)
        )
        loss, _ = largest_difference(two, one, scale=self._scale)
        return loss <= self.limit and not compare_gradients(other, reference)

    def _changes_loss(self, what: str) -> bool:
        """Return whether one change gives another loss in the first step, at the larger number of ranks."""
        changed = self._rerun(self.other.case.ranks, (what,), 0)
        one, two = self.source.curve(self.other), self.source.curve(changed)
        first = min(one.keys() & two.keys(), default=None)
        return first is not None and relative(two[first], one[first], self._scale) > self.limit

    def _model_cause(self, what: str, pair: tuple[CaseRecords, CaseRecords]) -> Cause:
        before = compare(self.other, self.reference, self.source, limit=self.limit)
        after = compare(pair[1], pair[0], self.source, limit=self.limit)
        name, how = SHOWN[what]
        return Cause(
            name,
            f"{self._evidence} {how.capitalize()}, {self.other.ranks_text} and {self.reference.ranks_text} "
            f"differ by {after.loss:.1g} in the loss instead of {before.loss:.1g}.",
            FIXES[what],
        )

    def _part(self, what: str) -> Cause:
        name, how = SHOWN[what]
        return Cause(
            name,
            f"{self._evidence} {how.capitalize()}, the losses change. But {self.other.ranks_text} and "
            f"{self.reference.ranks_text} still differ, so this is not the only cause.",
            FIXES[what],
        )

    # -- random numbers, the first gradient, and what is left ------------------------------------------

    def _rest(self, reference: CaseRecords, other: CaseRecords) -> Cause:
        found = self._draws(reference, other)
        gradients = GradientComparison(reference, other)
        if found is None and self._evidence.knows_samples:
            found = gradients.cause()
        if found is None and gradients.agrees:
            found = find_rate_cause(reference, other)
        return found or self._unexplained(reference, other, gradients)

    def _draws(self, reference: CaseRecords, other: CaseRecords) -> Cause | None:
        """Repeat the reference with other random numbers in the forward pass: do they change its first loss?"""
        if DRAWS not in reference.uses | other.uses:
            return None
        changed = self._rerun(reference.case.ranks, (*reference.case.changes, OTHER_DRAWS), 0)
        one, two = reference.backward_losses(), changed.backward_losses()
        first = min(one.keys() & two.keys(), default=None)
        if first is None or relative(two[first], one[first], self._scale) <= self.limit:
            return None
        return Cause(
            "random numbers in the forward pass",
            f"{self._evidence} Between the call of the model and backward(), the script draws random numbers. With "
            f"different random numbers, the loss of step {first} with {reference.ranks_text} is {two[first]:.6g} "
            f"instead of {one[first]:.6g}, and each rank draws its own.",
            "This is expected with noise, sampling and stochastic depth. To prove the rest, turn it off with an option "
            "of the script.",
        )

    def _unexplained(
        self, reference: CaseRecords, other: CaseRecords, gradients: GradientComparison
    ) -> Cause:
        one, two = self.source.curve(reference), self.source.curve(other)
        first = next(
            (
                step
                for step in sorted(one.keys() & two.keys())
                if not relative(two[step], one[step], self._scale) <= self.limit
            ),
            0,
        )
        measured = (
            [f"The losses differ by more than {self.limit:g} from step {first} on."]
            if first
            else []
        )
        if DRAWS in reference.uses | other.uses:
            measured.append("The forward pass draws random numbers.")
        measured += [str(self._evidence), "The initial weights agree.", str(gradients)]
        hints = (
            "If the difference grows slowly from a tiny one, it is rounding: try a lower learning rate, fewer steps, "
            "float64, or --tolerance. Otherwise look for what changes during training: a schedule, clipping, an "
            "average of weights, a state of its own on each rank."
        )
        if gradients.is_known and not gradients.agrees:
            hints = (
                "Look for what acts before the first step: the samples, if they were not recorded, what the model "
                "computes, and what changes the gradients between backward() and the step."
            )
        return Cause(UNKNOWN, " ".join(measured), hints)


def _without(values: Sequence[str], one: str) -> list[str]:
    return [each for each in values if each != one]


def find_repeat_cause(one: CaseRecords, again: CaseRecords, source: LossSource) -> Cause | None:
    """Return a cause if two equal runs differ."""
    losses, others = source.curve(one), source.curve(again)
    start, start_again = one.first.start, again.first.start
    if start.get("weights") != start_again.get("weights"):
        what = "the initial weights already differ"
    elif losses != others:
        step = next(
            step
            for step in sorted(losses.keys() | others.keys())
            if losses.get(step) != others.get(step)
        )
        what = f"the losses differ from step {step} on"
    else:
        return None
    what = f"Two equal runs with {one.ranks_text} differ: {what}"
    if start.get("seed") != start_again.get("seed"):
        return Cause(
            SEED,
            f"{what}, and torch has a different seed.",
            f"Seed everything: paceline.session(seed=0), or --seed 0. {ON_GPUS}",
        )
    return Cause(
        UNSTABLE,
        f"{what}, although torch has the same seed. The cause is unknown.",
        "Look for other sources of randomness (NumPy, Python, the order of a set or of files), for files that the "
        f"script reads and writes, and for the time. {ON_GPUS}",
    )
