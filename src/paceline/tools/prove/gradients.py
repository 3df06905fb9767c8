"""How the first gradients of two cases with the same weights and samples differ, and what that shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.tools.prove.records import CaseRecords
from paceline.tools.prove.samples import Cause

# Up to rounding; single precision may use TF32.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
# Gradients that are zero but for rounding, such as those of a bias before BatchNorm, are compared with all the others.
SMALL = 1e-2

SPLIT_LOSS = "a loss that depends on the split of the batch"
CLIPPING = "gradients that are clipped before they are averaged"
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
        return self._clipping() or self._scale() or self._split_loss()

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

    def _clipping(self) -> Cause | None:
        """Ranks that have averaged their gradients clip the same ones."""
        records = [rank.steps.get(self.step, {}) for rank in self.other.ranks]
        clips = [each["clip"] for each in records if each.get("clip")]
        if len(clips) < len(records) or not all_equal([each.get("gradient") for each in records]):
            return None
        sizes = [each["size"] for each in clips]
        is_active = any(each["size"] > each["limit"] for each in clips)
        if not is_active or max(sizes) - min(sizes) <= self.tolerance * max(sizes):
            return None
        shown = ", ".join(f"{size:.4g}" for size in sizes)
        return Cause(
            CLIPPING,
            f"In step {self.step}, the {len(sizes)} ranks clip gradients of different sizes ({shown}; the limit is "
            f"{clips[0]['limit']:g}), though all of them step with the same ones.",
            "Clip after the average: after backward() of a DDP model, with the last micro-step, or with "
            "run.update(opt, clip=...).",
        )

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
