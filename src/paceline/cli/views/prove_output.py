"""What `paceline prove` prints: each run when it begins, then a table and what broke it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli import console

if TYPE_CHECKING:
    from paceline.tools.prove.cases import Case
    from paceline.tools.prove.comparison import Comparison
    from paceline.tools.prove.proof import Proof, Request


class ProofProgress:
    """Says which run begins."""

    def __init__(self, request: Request) -> None:
        self._total = len(request.cases) + len(request.scaled)
        self._case: Case | None = None
        self._number = 0

    def show(self, case: Case, step: int) -> None:
        if case != self._case:
            self._case, self._number = case, self._number + 1
            console.say_note(f"run {self._number} of {max(self._number, self._total)}: {case.name}")

    def skip(self, count: int) -> None:
        """Expect fewer runs."""
        self._total -= count


def print_proof(proof: Proof) -> None:
    """Print the table of comparisons, what could not be run, and what broke it."""
    from rich.table import Table

    from paceline.tools.prove.proof import last_loss

    out = console.console()
    table = Table(box=None, pad_edge=False)
    for name in ("run", "compared with"):
        table.add_column(name)
    for name in ("losses", "weights", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in proof.comparisons:
        table.add_row(*_row(each))
    out.print(table)
    for name, reason in proof.skipped.items():
        out.print(f"[dim]{console.cell(name)}: skipped, {console.cell(reason)}[/]", soft_wrap=True)
    out.print(
        f"[dim]Largest differences · {console.cell(' · '.join(proof.facts()))}[/]", soft_wrap=True
    )
    if proof.holds:
        out.print("[good]✓ The training is the same in all runs.[/]")
    for records in proof.scaled:
        out.print(
            f"  {console.cell(records.case.name)}: last loss {last_loss(proof, records):.4g}",
            soft_wrap=True,
        )
    for cause in proof.causes:
        out.print(f"[bad]✗ What broke it: {console.cell(cause.name)}.[/]", soft_wrap=True)
        out.print(f"  {console.cell(cause.evidence)}", soft_wrap=True)
        out.print(f"  {console.cell(cause.fix)}", soft_wrap=True)


def _row(each: Comparison) -> tuple[str, ...]:
    ok = "[good]✓[/]" if each.agrees else "[bad]✗[/]"
    loss = _number(each.loss) + (
        "" if each.agrees or not each.loss_step else f" (step {each.loss_step})"
    )
    weights = "-" if each.weights is None else _number(each.weights)
    note = f"{ok} {console.cell(each.note)}" if each.note else ok
    return (
        console.cell(each.name),
        console.cell(each.against),
        loss,
        weights,
        _number(each.limit),
        note,
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
