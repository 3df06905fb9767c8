"""The runs of a proof: numbers of ranks, launch styles, and one that is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.contract.proof_spec import OTHER_DRAWS
from paceline.errors import UsageError

DEFAULT_STYLE = "fork"


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    ranks: int
    steps: int
    style: str = DEFAULT_STYLE
    interrupted: bool = False  # stopped in the middle, and resumed
    # what is off or different, to find out what a difference comes from
    changes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # the same for all cases of a proof, so not part of the name
    repeat: int = 0

    @property
    def name(self) -> str:
        parts = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"]
        if self.style != DEFAULT_STYLE:
            parts.append(self.style)
        if self.interrupted:
            parts.append("interrupted")
        changes = [each for each in self.changes if each != OTHER_DRAWS]
        if changes:
            parts.append(f"without {' and '.join(changes)}")
        if OTHER_DRAWS in self.changes:
            parts.append(OTHER_DRAWS)
        if self.repeat:
            parts.append("again")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return f"{self.name}, {self.steps} steps".replace(",", "").replace(" ", "-")


def plan_cases(
    ranks: Sequence[int], styles: Sequence[str], *, steps: int, interrupt: bool
) -> list[Case]:
    """Return the runs of a proof, the reference first.

    Every number of ranks runs in the first style. The other styles, and the interruption, run at the first number
    above one: they have to repeat that run bit for bit.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(
            "--ranks needs different numbers, each at least 1.", hint="For example --ranks 1,2,4."
        )
    if not styles:
        raise UsageError("--styles is empty.", hint="For example --styles fork,torchrun.")
    if steps < 2:
        raise UsageError(
            f"--steps {steps} is too few to compare.", hint="Use at least 2; the default is 30."
        )
    found = [Case(count, steps, styles[0]) for count in ranks]
    several = next((case for case in found if case.ranks > 1), found[0])
    found += [replace(several, style=style) for style in styles[1:]]
    if interrupt:
        found.append(replace(several, interrupted=True))
    if len(found) == 1:
        found.append(replace(several, repeat=1))
    return found
