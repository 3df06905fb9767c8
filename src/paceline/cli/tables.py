"""Tables that fit the terminal: columns that matter least drop out, long texts wrap, and in a pipe nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2  # spaces between columns
KEPT = 0  # the rank of columns that never drop out


@dataclass
class Column:
    """A column: its cells in rich markup, and how much it matters."""

    title: str
    rank: int = KEPT  # the largest drops out first
    wraps_at: int | None = (
        None  # the width below which its texts do not wrap; None if they never do
    )
    justify: Any = "left"
    cells: list[str] = field(default_factory=list)

    @property
    def narrowest(self) -> int:
        from rich.text import Text

        widest = max(Text.from_markup(cell).cell_len for cell in {self.title, *self.cells})
        return widest if self.wraps_at is None else min(widest, self.wraps_at)


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and those that drop out. Empty columns take no room."""
    filled = [column for column in columns if column.rank == KEPT or any(column.cells)]
    shown, sizes = list(filled), {column.title: column.narrowest + GAP for column in filled}
    while sum(sizes[column.title] for column in shown) - GAP > width:
        last = max(shown, key=lambda column: column.rank)
        if last.rank == KEPT:
            break
        shown.remove(last)
    return shown, [column for column in filled if column not in shown]


def print_columns(out: Console, shown: Sequence[Column]) -> None:
    """Print columns that `fit`. In a pipe, lines end where their text does."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column in shown:
        table.add_column(
            column.title,
            no_wrap=column.wraps_at is None,
            min_width=column.narrowest,
            justify=column.justify,
            overflow="fold",
        )
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    out.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())
