"""A proof as files: `report.html`, which needs nothing else, the curves as a picture, and the numbers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from html import escape
from pathlib import Path

from paceline.tools.prove.comparison import Comparison, loss_scale, relative
from paceline.tools.prove.curves import Curve, draw_differences, draw_losses, stand_alone
from paceline.tools.prove.page import PAGE, STYLE
from paceline.tools.prove.proof import Proof, last_loss
from paceline.tools.prove.records import CaseRecords

OWN_STYLE = """
.limit { stroke: var(--failed); stroke-dasharray: 4 4; } .good { color: var(--done); font-weight: 600; }
.bad { color: var(--failed); font-weight: 600; } td.number, th.number { text-align: right; }
.verdict { font-size: 1.25rem; margin: 1rem 0 0; } .wide { white-space: normal; }
"""


def write_report(proof: Proof, folder: Path, *, title: str) -> Path:
    """Write the files into the proof's folder; return the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    losses = draw_losses([Curve(each.case.name, proof.curve(each)) for each in proof.cases])
    (folder / "curves.svg").write_text(stand_alone(losses), encoding="utf-8")
    (folder / "proof.json").write_text(
        json.dumps(to_table(proof), indent=1) + "\n", encoding="utf-8"
    )
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
        "scaled": {each.case.name: by_samples(each, proof) for each in proof.scaled},
    }


def render(proof: Proof, losses: str, *, title: str) -> str:
    """Return the whole page."""
    reference = proof.cases[0]
    facts = [*proof.facts(), time.strftime("%Y-%m-%d %H:%M")]
    verdict = "<span class='good'>✓ The training is the same in all runs.</span>"
    if not proof.holds:
        verdict = "<span class='bad'>✗ The runs differ.</span>"
    body = [
        f"<h1>{escape(title)}</h1><p class='facts'>{escape(' · '.join(facts))}</p><p class='verdict'>{verdict}</p>",
        _causes(proof),
        _comparisons(proof),
        _section(
            "Losses",
            losses,
            f"The wide line is {reference.case.name}; the others are drawn on top of it.",
        ),
        _differences(proof),
        _scaled(proof),
    ]
    return PAGE.format(
        title=escape(f"proof of {title}"), style=STYLE + OWN_STYLE, body="\n".join(body)
    )


def _causes(proof: Proof) -> str:
    return "".join(
        f"<section><h2>What broke it: {escape(each.name)}</h2><p>{escape(each.evidence)}</p>"
        f"<p>{escape(each.fix)}</p></section>"
        for each in proof.causes
    )


def _comparisons(proof: Proof) -> str:
    rows = [_row(each) for each in proof.comparisons]
    rows += [
        f"<tr><td>{escape(name)}</td><td class='wide' colspan='5'>skipped: {escape(reason)}</td></tr>"
        for name, reason in proof.skipped.items()
    ]
    head = "<th>run</th><th>compared with</th>" + "".join(
        f"<th class='number'>{name}</th>" for name in ("losses", "weights", "allowed")
    )
    note = (
        "Largest differences: losses relative to their size, trained weights relative to their size if it is above 1. "
        "Runs with the same number of ranks must be identical."
    )
    return (
        f"<section><h2>Differences</h2><div class='picture'><table><thead><tr>{head}<th></th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='facts'>{escape(note)}</p></section>"
    )


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


def _differences(proof: Proof) -> str:
    by_name = {each.case.name: each for each in proof.cases}
    curves = []
    for each in proof.comparisons:
        one, other = proof.curve(by_name[each.name]), proof.curve(by_name[each.against])
        scale = loss_scale(other, by_name[each.against].dtype)
        points = {
            step: relative(one[step], other[step], scale)
            for step in sorted(one.keys() & other.keys())
        }
        curves.append(Curve(f"{each.name} - {each.against}", points))
    note = "Each run's losses minus those of the run that it is compared with. Equal losses are on the bottom line."
    return (
        _section("Differences by step", draw_differences(curves, proof.limit), note)
        if curves
        else ""
    )


def _scaled(proof: Proof) -> str:
    if not proof.scaled:
        return ""
    curves = [Curve(each.case.name, by_samples(each, proof)) for each in proof.scaled]
    ends = "; ".join(f"{each.case.name}: {last_loss(proof, each):.4g}" for each in proof.scaled)
    note = (
        "The global batch grows with the ranks, and the learning rate with it, after a warm-up. A scaling that works "
        f"keeps the curves together. Mean loss over the last fifth: {ends}."
    )
    return _section(
        "Scaled batches and learning rates", draw_losses(curves, across="samples seen"), note
    )


def by_samples(records: CaseRecords, proof: Proof) -> dict[int, float]:
    """Return the losses of a run by the number of samples that all ranks have seen by then."""
    seen, found = 0, {}
    losses = proof.curve(records)
    for step in sorted(records.first.steps):
        seen += sum(records.together(step, "rows") or [0])
        if step in losses:
            found[seen] = losses[step]
    return found


def _section(title: str, plot: str, note: str) -> str:
    return f"<section><h2>{title}</h2><div class='picture'>{plot}</div><p class='facts'>{escape(note)}</p></section>"
