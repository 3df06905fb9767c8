"""A proof: run its cases, compare them, find what broke it, and report it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Protocol

from paceline.errors import RunError
from paceline.sweep.results import to_label
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

    def __init__(
        self,
        request: Request,
        runner: Runner,
        *,
        tell: Callable[[str], None] = lambda text: None,
        skip: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.request, self.runner, self.tell, self.skip = request, runner, tell, skip
        self.proof = Proof()
        self._known: dict[Case, CaseRecords] = {}

    def prove(self) -> Proof:
        """Run everything. Raises RunError if a case fails, or if there is no loss to compare."""
        proof, first = self.proof, self._changed(self.request.cases[0])
        reference = self._run(first, [])
        self._learn(reference)
        proof.cases.append(reference)
        if not reference.uses_runtime:
            self.skip(sum(case.interrupted for case in self.request.cases))
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

        self.tell(f"{failed.name} and {failed.against} differ; looking for the cause")
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


PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #667080; --line: #d5dae1; --panel:
  #f6f7f9; --done: #2f9e5b; --failed: #d1383d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ee; --faint: #97a1af; --line: #343b45;
  --panel: #1c2026; --done: #45b974; --failed: #f0605f; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 72rem; background: var(--paper); color: var(--ink); font:
  15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 0 0 .6rem; font-size: 1.1rem; }
section { margin: 2.2rem 0; }
.facts { color: var(--faint); font-size: .87rem; margin: .4rem 0 0; overflow-wrap: anywhere; }
.picture { overflow-x: auto; max-height: 36rem; overflow-y: auto; background: var(--panel); border: 1px solid
  var(--line); border-radius: 8px; padding: .75rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg .grid { stroke: var(--line); }
svg .line { fill: none; }
svg .line:hover { stroke: var(--ink); stroke-width: 4; stroke-opacity: 1; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; white-space: nowrap; border-bottom: 1px solid
  var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; }
.good { color: var(--done); font-weight: 600; }
.bad { color: var(--failed); font-weight: 600; } td.number, th.number { text-align: right; }
.verdict { font-size: 1.25rem; margin: 1rem 0 0; } .wide { white-space: normal; }
"""

# Told apart on white and on black, and by most people who see colours differently.
COLOURS = ("#2f7fd6", "#e8590c", "#2f9e5b", "#a64ac9", "#c99a1d", "#d1383d", "#0ca5b0", "#8a93a0")
DASHES = ("none", "7 4", "2 3", "10 3 2 3", "1 4", "12 4")
# For a picture on its own; in the report, the page's style says the same for light and dark.
PICTURE_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1b1f24}.grid{stroke:#d5dae1}.line{fill:none}"
    '</style><rect width="100%" height="100%" fill="#fff"/>'
)
LEFT, RIGHT, TOP, BOTTOM = 76, 880, 18, 300
ROW = 22  # of the legend

Curves = Mapping[str, Mapping[int, float]]  # losses by step, of each run


def write_report(proof: Proof, folder: Path, *, title: str) -> Path:
    """Write the files into the proof's folder; return the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    losses = draw({each.case.name: proof.curve(each) for each in proof.cases})
    begin, rest = losses.split(">", 1)
    alone = f"{begin}>{PICTURE_STYLE}{rest}\n"
    (folder / "curves.svg").write_text(alone, encoding="utf-8")
    numbers = json.dumps(to_table(proof), indent=1) + "\n"
    (folder / "proof.json").write_text(numbers, encoding="utf-8")
    report = folder / "report.html"
    report.write_text(render(proof, losses, title=title), encoding="utf-8")
    return report


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


def render(proof: Proof, losses: str, *, title: str) -> str:
    """Return the whole page."""
    facts = [*proof.facts(), time.strftime("%Y-%m-%d %H:%M")]
    verdict = "<span class='good'>✓ The training is the same in all runs.</span>"
    if not proof.holds:
        verdict = "<span class='bad'>✗ The runs differ.</span>"
    wide = f"The wide line is {proof.cases[0].case.name}; the others are drawn on top of it."
    body = [f"<h1>{escape(title)}</h1><p class='facts'>{escape(' · '.join(facts))}</p>"]
    body.append(f"<p class='verdict'>{verdict}</p>")
    for cause in proof.causes:
        body.append(f"<section><h2>What broke it: {escape(cause.name)}</h2>")
        body.append(f"<p>{escape(cause.evidence)}</p><p>{escape(cause.fix)}</p></section>")
    body += [_comparisons(proof), _section("Losses", losses, wide)]
    about = escape(f"proof of {title}")
    return PAGE.format(title=about, style=STYLE, body="\n".join(body))


def _comparisons(proof: Proof) -> str:
    rows = [_row(each) for each in proof.comparisons]
    for name, reason in proof.skipped.items():
        why = f"<td class='wide' colspan='5'>skipped: {escape(reason)}</td>"
        rows.append(f"<tr><td>{escape(name)}</td>{why}</tr>")
    head = (
        "<th>run</th><th>compared with</th><th>losses</th><th>weights</th><th>allowed</th><th></th>"
    )
    note = (
        "Largest differences: losses relative to their size, trained weights relative to their size if it is above 1. "
        "Runs with the same number of ranks must be identical."
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _section("Differences", table, note)


def _row(each: Comparison) -> str:
    weights = "not recorded" if each.weights is None else _number(each.weights)
    where = f" in step {each.loss_step}" if each.loss_step and not each.agrees else ""
    inside = f" ({each.parameter})" if each.parameter and not each.agrees else ""
    mark = "<span class='good'>✓</span>" if each.agrees else "<span class='bad'>✗</span>"
    numbers = (_number(each.loss) + where, weights + inside, _number(each.limit))
    cells = "".join(f"<td class='number'>{escape(text)}</td>" for text in numbers)
    return (
        f"<tr><td>{escape(each.name)}</td><td>{escape(each.against)}</td>{cells}"
        f"<td class='wide'>{mark} {escape(each.note)}</td></tr>"
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _section(title: str, content: str, note: str) -> str:
    picture = f"<div class='picture'>{content}</div><p class='facts'>{escape(note)}</p>"
    return f"<section><h2>{title}</h2>{picture}</section>"


def draw(curves: Curves) -> str:
    """Draw losses on top of each other as SVG. The first curve is wide and pale, so that equal ones are seen on it."""
    points = [point for curve in curves.values() for point in curve.items()]
    values = [value for _, value in points if math.isfinite(value)] or [0.0, 1.0]
    margin = 0.05 * (max(values) - min(values)) or 0.5
    low, high = min(values) - margin, max(values) + margin
    first, last = min(at for at, _ in points or [(0, 0)]), max(at for at, _ in points or [(1, 0)])

    def place(at: float, value: float) -> tuple[float, float]:
        x = LEFT + (at - first) / ((last - first) or 1) * (RIGHT - LEFT)
        return x, BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    parts = [_label((LEFT + RIGHT) / 2, BOTTOM + 38, "step", "middle"), _label(4, 12, "loss")]
    for value in (low + (high - low) * part / 5 for part in range(6)):
        y = place(first, value)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(_label(LEFT - 8, y + 4, to_label(value), "end"))
    for mark in sorted({first + (last - first) * part // 5 for part in range(6)}):
        parts.append(_label(place(mark, low)[0], BOTTOM + 20, f"{mark:,}", "middle"))
    for number, (name, curve) in enumerate(curves.items()):
        dash = DASHES[number % len(DASHES)]
        style = (
            f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2" stroke-dasharray="{dash}"'
        )
        if number == 0:
            style = f'stroke="{COLOURS[0]}" stroke-width="7" stroke-opacity=".35"'
        dots = [place(at, value) for at, value in sorted(curve.items()) if math.isfinite(value)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in dots) or "0 0"
        parts.append(f'<path class="line" d="M{line}" {style}><title>{escape(name)}</title></path>')
        x, y = LEFT + number % 2 * 412, BOTTOM + 62 + number // 2 * ROW
        parts += [f'<path class="line" d="M{x} {y}h34" {style}/>', _label(x + 42, y + 4, name)]
    height = BOTTOM + 62 + -(-len(curves) // 2) * ROW
    about = escape(f"loss by step of {len(curves)} runs")
    size = f'viewBox="0 0 {RIGHT + 20} {height}" style="min-width:630px" role="img" aria-label="{about}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
