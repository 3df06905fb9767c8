"""A proof: run its cases, compare them, and find what broke it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from paceline.errors import RunError
from paceline.tools.prove.causes import Cause
from paceline.tools.prove.comparison import TOLERANCES, Comparison, compare
from paceline.tools.prove.diagnosis import Diagnosis
from paceline.tools.prove.records import Case, CaseRecords

_log = logging.getLogger("paceline")


class Runner(Protocol):
    """What runs a case. Its ranks compare their final weights with those of the case `against`,
    which has run before.
    """

    def run(self, case: Case, against: Case | None) -> CaseRecords: ...


@dataclass
class Proof:
    """The result."""

    cases: list[CaseRecords] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # cases that could not be run, and why
    causes: list[Cause] = field(default_factory=list)
    limit: float = 0.0  # of differences between numbers of ranks

    @property
    def holds(self) -> bool:
        return all(each.agrees for each in self.comparisons)

    def facts(self) -> list[str]:
        """Return what all runs have in common."""
        reference = self.cases[0]
        noise = reference.first.end.get("noise", [])
        return [
            f"{len(reference.losses)} steps",
            reference.dtype,
            *(f"without {each}" for each in reference.case.without),
            "losses: those of backward(), averaged over the ranks",
            "weights: those of the optimizers",
            *([f"no gradient but rounding, so not compared: {', '.join(noise)}"] if noise else []),
        ]

    def write(self, folder: Path) -> Path:
        """Write all numbers into the proof's folder; return the path of the file."""
        table = {
            "holds": self.holds,
            "tolerance": self.limit,
            "comparisons": [{**asdict(each), "agrees": each.agrees} for each in self.comparisons],
            "causes": [each.as_json() for each in self.causes],
            "skipped": self.skipped,
            "losses": {each.case.name: each.losses for each in self.cases},
        }
        file = folder / "proof.json"
        file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return file


def prove(cases: Sequence[Case], runner: Runner, *, tolerance: float | None) -> Proof:
    """Run all cases, the first of which is the reference. A tolerance of None depends on the dtype.

    Raises RunError if a case fails, or if there is no loss to compare.
    """
    reference = runner.run(cases[0], None)
    _check_losses(reference)
    limit = TOLERANCES.get(reference.dtype, TOLERANCES["float32"])
    proof = Proof([reference], limit=limit if tolerance is None else tolerance)
    for case in cases[1:]:
        if case.interrupted and not reference.uses_runtime:
            proof.skipped[case.name] = (
                "the script does not use paceline.session, which saves and resumes"
            )
            continue
        twin = next((each for each in proof.cases if each.case.ranks == case.ranks), None)
        against = twin or reference
        records = runner.run(case, against.case)
        if case.interrupted and records.note:
            proof.skipped[case.name] = records.note
            continue
        proof.cases.append(records)
        limit = proof.limit if twin is None else 0.0
        proof.comparisons.append(compare(records, against, limit=limit))
    if not proof.comparisons:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in proof.skipped.items())
        raise RunError(
            f"There was nothing to compare ({reasons or 'only one run'}).",
            hint="Compare at least two numbers of ranks, e.g. --ranks 1,2.",
        )
    if not proof.holds:
        proof.causes = _diagnose(proof, runner)
    return proof


def _check_losses(reference: CaseRecords) -> None:
    if not reference.losses:
        raise RunError(
            "The script shows no loss: it never calls backward() on one.",
            hint="Name a script that trains with torch and an optimizer.",
        )
    if not all(map(math.isfinite, reference.losses.values())):
        raise RunError(
            f"The loss with {reference.case.name} is not finite.",
            hint="Use a script that trains correctly on one rank.",
        )


def _diagnose(proof: Proof, runner: Runner) -> list[Cause]:
    """Explain one case that disagrees. Two equal runs that differ say most: whatever makes them
    differ makes all others differ, too.
    """
    failed = [each for each in proof.comparisons if not each.agrees]
    by_name = {each.case.name: each for each in proof.cases}
    failed.sort(key=lambda each: each.limit > 0 or by_name[each.name].case.interrupted)
    other, reference = by_name[failed[0].name], by_name[failed[0].against]
    _log.info(f"{other.case.name} and {reference.case.name} differ; looking for the cause")

    def rerun(ranks: int, changes: Sequence[str], is_repeat: bool) -> CaseRecords:
        first = replace(reference.case, changes=tuple(changes))
        case = replace(first, ranks=ranks, repeat=int(is_repeat))
        return runner.run(case, None if case == first else first)

    is_reproducible = any(each.limit == 0 and each.agrees for each in proof.comparisons)
    return Diagnosis(
        reference, other, limit=proof.limit, rerun=rerun, is_reproducible=is_reproducible
    ).causes()
