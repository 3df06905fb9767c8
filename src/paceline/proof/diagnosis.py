"""What broke a proof: causes that the records of the ranks show, and reruns with one thing changed confirm.

The causes are tried in the order in which they act: what differs at the start, which samples a step gets, what is in
them, what the model draws or computes per rank, how the loss is scaled. Later ones count only if nothing earlier
explains the difference: other samples give other gradients, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.contract.files.probe_spec import BATCHNORM, DROPOUT
from paceline.proof.cause import Cause
from paceline.proof.comparison import LossSource, compare, relative
from paceline.proof.records import CaseRecords
from paceline.proof.sample_evidence import find_sample_cause

Rerun = Callable[[int, Sequence[str], int], CaseRecords]  # ranks, changes, repeat


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
        self, reference: CaseRecords, other: CaseRecords, source: LossSource, *, limit: float, rerun: Rerun
    ) -> None:
        self.reference, self.other, self.source, self.limit = reference, other, source, limit
        self.is_reproducible = False  # whether equal runs are known to be equal
        self._rerun = rerun

    def causes(self) -> list[Cause]:
        if self.reference.case.ranks == self.other.case.ranks:
            return [self._irreproducible() or self._resume_cause() or self._style_cause()]
        found = self._early_cause()
        if found is not None:
            return [found]
        causes = self._changed_causes()
        if causes:
            return causes
        return [self._gradient_cause(self.reference, self.other) or self._unexplained()]

    # -- before the first gradient ---------------------------------------------------------------------

    def _early_cause(self) -> Cause | None:
        return (
            self._irreproducible()
            or self._initial_weights()
            or find_sample_cause(self.reference, self.other)
            or self._replicas()
        )

    def _irreproducible(self) -> Cause | None:
        """Compare the reference with a repeat of itself."""
        if self.is_reproducible:
            return None
        again = self._rerun(self.reference.case.ranks, (), 1)
        one, other = self.source.curve(self.reference), self.source.curve(again)
        start, start_again = self.reference.first.start.get("weights"), again.first.start.get("weights")
        if start != start_again:
            what = "the initial weights already differ"
        elif one != other:
            step = next((step for step in sorted(one.keys() | other.keys()) if one.get(step) != other.get(step)), 0)
            what = f"the losses differ from step {step} on"
        else:
            return None
        return Cause(
            "no fixed seed",
            f"Two equal runs with {_ranks(self.reference)} differ: {what}.",
            "Seed everything: paceline.session(seed=0), or --seed 0; on GPUs also --deterministic.",
        )

    def _resume_cause(self) -> Cause | None:
        if not self.other.case.interrupted:
            return None
        found = find_sample_cause(self.reference, self.other)
        one, other = self.source.curve(self.reference), self.source.curve(self.other)
        first = next((step for step in sorted(one.keys() & other.keys()) if one[step] != other[step]), 0)
        what = found.evidence if found else "The samples are the same."
        return Cause(
            "the resume",
            f"It stopped after step {self.other.stopped_after}, and from step {first or '?'} on, the losses are others "
            f"than without the interruption. {what}",
            "Pass everything that changes during training to run.resume: schedulers, averages of weights, generators, "
            "your own counters. Let run.loader read the data.",
        )

    def _style_cause(self) -> Cause:
        return Cause(
            "the launch style",
            f"{self.other.case.name} and {self.reference.case.name} differ, though the latter repeats itself.",
            "Look for what the script reads from its environment: variables, the working directory, numbers of "
            "threads.",
        )

    def _initial_weights(self) -> Cause | None:
        if self.reference.first.start.get("weights") == self.other.first.start.get("weights"):
            return None
        return Cause(
            "initial weights",
            f"Before the first step, rank 0 has other weights with {_ranks(self.other)} than with "
            f"{_ranks(self.reference)}.",
            "Build the model with the same seed at every number of ranks: do not add the rank, and do not draw random "
            "numbers for the data before it.",
        )

    def _replicas(self) -> Cause | None:
        """Compare the weights of the ranks of one run."""
        ends = {rank.end["weights"] for rank in self.other.ranks if rank.end}
        if len(ends) < 2:
            return None
        return Cause(
            "gradients that are not averaged",
            f"At the end, the {_ranks(self.other)} have {len(ends)} different sets of weights.",
            "Wrap the model in DistributedDataParallel or run.wrap, and build the optimizer from its parameters.",
        )

    # -- what the model does ---------------------------------------------------------------------------

    def _changed_causes(self) -> list[Cause]:
        """Run both again without what depends on the rank. What makes the difference go away is the cause."""
        suspects = [each for each in (DROPOUT, BATCHNORM) if each in self.other.uses | self.reference.uses]
        suspects = [each for each in suspects if each not in self.other.case.without]
        if not suspects:
            return []
        pair = self._pair(suspects)
        if not self._agrees(*pair):
            rest = self._gradient_cause(*pair)
            return [rest] if rest is not None else []
        if len(suspects) > 1:
            # Each is a cause if the difference is still there without the others.
            suspects = [
                each for each in suspects if not self._agrees(*self._pair([one for one in suspects if one != each]))
            ] or suspects
        return [self._changed_cause(each, pair) for each in suspects]

    def _pair(self, changes: Sequence[str]) -> tuple[CaseRecords, CaseRecords]:
        reference = self._rerun(self.reference.case.ranks, changes, 0)
        return reference, self._rerun(self.other.case.ranks, changes, 0)

    def _agrees(self, reference: CaseRecords, other: CaseRecords) -> bool:
        return compare(other, reference, self.source, limit=self.limit).agrees

    def _changed_cause(self, what: str, pair: tuple[CaseRecords, CaseRecords]) -> Cause:
        before = compare(self.other, self.reference, self.source, limit=self.limit)
        after = compare(pair[1], pair[0], self.source, limit=self.limit)
        name, how = SHOWN[what]
        return Cause(
            name,
            f"The ranks see the same samples. {how.capitalize()}, {_ranks(self.other)} and {_ranks(self.reference)} "
            f"differ by {after.loss:.1g} in the loss instead of {before.loss:.1g}.",
            FIXES[what],
        )

    # -- the first gradient ----------------------------------------------------------------------------

    def _gradient_cause(self, reference: CaseRecords, other: CaseRecords) -> Cause | None:
        """Compare the gradients of the first step, which has the same weights and samples."""
        one, two = _first_step(reference), _first_step(other)
        if one is None or two is None:
            return None
        ranks = other.case.ranks / reference.case.ranks
        for factor, how in ((1 / ranks, "smaller"), (ranks, "larger")):
            if _is_multiple(two["gradient"], one["gradient"], factor) and relative(two["norm"], one["norm"]) > 0:
                return Cause(
                    "an unscaled sum",
                    f"In the first step, with equal weights and samples, all gradients are {ranks:g} times {how} with "
                    f"{_ranks(other)} than with {_ranks(reference)}.",
                    "DDP averages gradients over ranks, so each rank's loss has to be the mean over its own samples: "
                    'use reduction="mean", or run.backward(loss_sum, weight=n), which divides by the global count.',
                )
        if not _is_multiple(two["gradient"], one["gradient"], 1.0):
            return Cause(
                "the weighting of the loss",
                f"In the first step, with equal weights and samples, the gradients differ (norm {two['norm']:.6g} with "
                f"{_ranks(other)}, {one['norm']:.6g} with {_ranks(reference)}), and not by a common factor.",
                "A mean over tokens or other things of which ranks have different numbers needs the sum and its count: "
                "run.backward(loss_sum, weight=n). A loss between the samples of a batch sees only those of its rank.",
            )
        if one["rates"] != two["rates"]:
            return Cause(
                "the learning rate",
                f"In the first step, gradients are equal, but the learning rate is {two['rates'][0]:.6g} with "
                f"{_ranks(other)} and {one['rates'][0]:.6g} with {_ranks(reference)}.",
                "At an equal global batch the learning rate stays the same: scale it by the global batch, as "
                "run.scale_lr(opt, batch=..., reference=...) does.",
            )
        return None

    def _unexplained(self) -> Cause:
        one, other = self.source.curve(self.reference), self.source.curve(self.other)
        first = next(
            (step for step in sorted(one.keys() & other.keys()) if relative(other[step], one[step]) > self.limit), 0
        )
        grows = f"The losses differ by more than {self.limit:g} from step {first} on. " if first else ""
        return Cause(
            "unknown",
            f"{grows}The samples, their contents, the initial weights and the first gradients agree.",
            "If the difference grows slowly from a tiny one, it is rounding: try a lower learning rate, fewer steps, "
            "float64, or --tolerance. Otherwise look for what changes during training: a schedule, clipping, an "
            "average of weights, a state of its own on each rank.",
        )


def _first_step(records: CaseRecords) -> dict[str, Any] | None:
    steps = records.first.steps
    found = steps[min(steps)] if steps else None
    return found if found is not None and found.get("gradient") else None


def _is_multiple(one: Sequence[float], other: Sequence[float], factor: float) -> bool:
    """Return whether each element is `factor` times the other, up to the rounding of single precision."""
    if len(one) != len(other):
        return False
    scale = max(*map(abs, one), factor * max(map(abs, other)))
    return all(abs(a - factor * b) <= 1e-3 * scale for a, b in zip(one, other, strict=True)) and scale > 0


def _ranks(records: CaseRecords) -> str:
    return f"{records.case.ranks} rank{'s' if records.case.ranks > 1 else ''}"
