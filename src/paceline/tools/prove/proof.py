"""A proof: run its cases, compare them, and find what broke it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from paceline.errors import RunError
from paceline.tools.prove.comparison import (
    Comparison,
    LossSource,
    choose_source,
    compare,
    tolerance,
)
from paceline.tools.prove.diagnosis import Diagnosis
from paceline.tools.prove.evidence import Cause
from paceline.tools.prove.records import Case, CaseRecords

_log = logging.getLogger("paceline")


class Runner(Protocol):
    """What runs a case. `against` are earlier cases with whose final weights it compares its own."""

    def run(self, case: Case, against: Sequence[Case]) -> CaseRecords: ...


@dataclass(frozen=True)
class Request:
    """What to prove."""

    cases: tuple[Case, ...]
    metric: str | None = None  # None: "loss", or what the ranks pass to backward()
    has_metrics_file: bool = False
    tolerance: float | None = None  # None: by the dtype
    without: tuple[str, ...] = ()  # changes of all cases


@dataclass
class Proof:
    """The result."""

    cases: list[CaseRecords] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # cases that could not be run, and why
    causes: list[Cause] = field(default_factory=list)
    source: LossSource = field(default_factory=lambda: LossSource("", "loss"))
    limit: float = 0.0

    @property
    def holds(self) -> bool:
        return all(each.agrees for each in self.comparisons)

    def facts(self) -> list[str]:
        """Return what all runs have in common."""
        reference = self.cases[0]
        changes = [f"without {each}" for each in reference.case.without]
        return [
            f"{len(self.curve(reference))} steps",
            reference.dtype,
            *changes,
            f"losses: {self.source}",
            "weights: those of the optimizers",
        ]

    def curve(self, records: CaseRecords) -> Mapping[int, float]:
        return self.source.curve(records)


class Prover:
    """Carries a request out."""

    def __init__(self, request: Request, runner: Runner) -> None:
        self.request, self.runner = request, runner
        self.proof = Proof()
        self._known: dict[Case, CaseRecords] = {}

    def prove(self) -> Proof:
        """Run everything. Raises RunError if a case fails, or if there is no loss to compare."""
        proof, first = self.proof, self._changed(self.request.cases[0])
        reference = self._run(first, [])
        self._learn(reference)
        proof.cases.append(reference)
        for case in map(self._changed, self.request.cases[1:]):
            if case.interrupted and not reference.uses_runtime:
                proof.skipped[case.name] = (
                    "the script does not use paceline.session, which saves and resumes"
                )
                continue
            twin = next((each for each in proof.cases if each.case.ranks == case.ranks), None)
            against = reference if twin is None else twin
            records = self._run(case, [against.case])
            limit = proof.limit if twin is None else 0.0
            if records.note and case.interrupted:
                proof.skipped[case.name] = records.note
                continue
            proof.cases.append(records)
            proof.comparisons.append(compare(records, against, proof.source, limit=limit))
        if not proof.comparisons:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in proof.skipped.items())
            raise RunError(
                f"There was nothing to compare ({reasons or 'only one run'}).",
                hint="Compare at least two numbers of ranks, e.g. --ranks 1,2.",
            )
        if not proof.holds:
            self._diagnose()
        return proof

    def _changed(self, case: Case) -> Case:
        return replace(case, without=self.request.without)

    def _run(self, case: Case, against: Sequence[Case]) -> CaseRecords:
        if case not in self._known:
            self._known[case] = self.runner.run(case, against)
        return self._known[case]

    def _learn(self, reference: CaseRecords) -> None:
        """Find out from the first run where the losses are, and how precise they are."""
        source = choose_source(
            reference, self.request.metric, has_file=self.request.has_metrics_file
        )
        if source is None:
            raise no_loss(reference, self.request.metric or "loss")
        self.proof.source = source
        self.proof.limit = (
            tolerance(reference) if self.request.tolerance is None else self.request.tolerance
        )
        losses = source.curve(reference).values()
        if not all(map(math.isfinite, losses)):
            raise RunError(
                f"The loss with {reference.case.name} is not finite.",
                hint="Use a script that trains correctly on one rank.",
            )

    def _diagnose(self) -> None:
        """Explain the first case that disagrees; another one with the same cause adds nothing."""
        proof = self.proof
        failed = next(each for each in proof.comparisons if not each.agrees)
        by_name = {each.case.name: each for each in proof.cases}
        other, reference = by_name[failed.name], by_name[failed.against]

        def rerun(ranks: int, changes: Sequence[str], repeat: int) -> CaseRecords:
            case = replace(reference.case, ranks=ranks, changes=tuple(changes), repeat=repeat)
            others = (
                [replace(reference.case, changes=tuple(changes))]
                if ranks != reference.case.ranks
                else []
            )
            return self._run(case, others)

        _log.info(f"{failed.name} and {failed.against} differ; looking for the cause")
        diagnosis = Diagnosis(reference, other, proof.source, limit=proof.limit, rerun=rerun)
        diagnosis.is_reproducible = any(
            each.limit == 0 and each.agrees for each in proof.comparisons
        )
        proof.causes = diagnosis.causes()


def no_loss(records: CaseRecords, name: str) -> RunError:
    """Return the error for a script whose training nothing shows."""
    names = ", ".join(sorted(set(records.logged) - {"step", "epoch", "time", "seconds"}))
    if names or records.backward_losses():
        other = f"Name one of these with --metric: {names}." if names else "Leave out --metric."
        return RunError(f"Nothing was logged as {name!r}.", hint=other)
    return RunError(
        "The script shows no loss: it calls neither backward() nor run.log.",
        hint=f"Log it with run.log({name}=...), or write JSON lines and name the file with --metrics FILE.",
    )


def write_numbers(proof: Proof, folder: Path) -> Path:
    """Write all numbers into the proof's folder; return the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "proof.json"
    file.write_text(json.dumps(to_table(proof), indent=1) + "\n", encoding="utf-8")
    return file


def to_table(proof: Proof) -> dict[str, object]:
    """Return the result as JSON values."""
    return {
        "holds": proof.holds,
        "tolerance": proof.limit,
        "comparisons": [{**asdict(each), "agrees": each.agrees} for each in proof.comparisons],
        "causes": [asdict(each) for each in proof.causes],
        "skipped": proof.skipped,
        "losses": {each.case.name: proof.curve(each) for each in proof.cases},
    }
