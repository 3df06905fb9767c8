"""What `paceline prove` prints: a progress bar while it runs, then a table and what broke it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.cli import console

if TYPE_CHECKING:
    from paceline.tools.prove.cases import Case
    from paceline.tools.prove.comparison import Comparison
    from paceline.tools.prove.proof import Proof, Request


class ProofProgress:
    """The case that runs: a bar over its steps on a terminal, else a line when it begins."""

    def __init__(self, request: Request) -> None:
        self._total = len(request.cases) + len(request.scaled)
        self._case: Case | None = None
        self._number = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProofProgress:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        out = console.console(stderr=True)
        if out.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeElapsedColumn(),
                console=out,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, case: Case, step: int) -> None:
        if case != self._case:
            self._case, self._number = case, self._number + 1
            place = (
                f"run {self._number} of {self._total}"
                if self._number <= self._total
                else f"run {self._number}"
            )
            if self._bar is None:
                console.say_note(f"{place}: {case.name}")
                return
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(f"{place}: {case.name}", total=case.steps)
        if self._bar is not None:
            self._bar.update(self._task, completed=min(step, case.steps))

    def skip(self, count: int) -> None:
        """Expect fewer runs."""
        self._total -= count

    def tell(self, text: str) -> None:
        console.say_note(text)


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
