"""Tables that fit the terminal: columns that matter least drop out, long texts wrap, and in a pipe nothing is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAP = 2  # spaces between columns
COMFORTABLE = 32  # a width at which texts wrap well
KEPT = 0  # the rank of columns that never drop out


@dataclass
class Column:
    """A column: its cells in rich markup, and how much it matters."""

    title: str
    rank: int = KEPT  # the largest drops out first
    wraps_at: int | None = None  # the narrowest width to which its texts wrap; None if they don't
    wraps_well_at: int = COMFORTABLE  # the width below which optional columns drop out for it
    optional: bool = False  # whether it drops out before texts of other columns become narrow
    crops: bool = False  # whether long texts end in "…" instead
    justify: Any = "left"
    cells: list[str] = field(default_factory=list)

    @cached_property
    def widest(self) -> int:
        """The width of its widest cell; ask once all of them are there."""
        from rich.text import Text

        return max(Text.from_markup(cell).cell_len for cell in {self.title, *self.cells})

    @property
    def narrowest(self) -> int:
        return self.widest if self.wraps_at is None else min(self.widest, self.wraps_at)

    @property
    def comfortable(self) -> int:
        return self.narrowest if self.wraps_at is None else min(self.widest, self.wraps_well_at)


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and those that drop out. Empty columns take no room."""
    filled = [column for column in columns if column.rank == KEPT or any(column.cells)]
    shown = list(filled)
    while True:
        optional = [column for column in shown if column.optional]
        others = [column for column in shown if column.rank != KEPT]
        needed = (column.comfortable if optional else column.narrowest for column in shown)
        if _total(needed) <= width or not others:
            return shown, [column for column in filled if column not in shown]
        shown.remove(max(optional or others, key=lambda column: column.rank))


def _total(sizes: Iterable[int]) -> int:
    return sum(size + GAP for size in sizes) - GAP


def make_table(shown: Sequence[Column], width: int) -> Table:
    """Return a table of columns that `fit`. Room that is left goes to the shortest texts first."""
    from rich.table import Table

    def is_long(column: Column) -> bool:
        return column.crops and column.widest > column.wraps_well_at

    left = width - _total(column.narrowest for column in shown)
    sizes = {}
    for column in sorted(shown, key=lambda column: (is_long(column), column.widest)):
        more = max(0, min(left, column.widest - column.narrowest))
        sizes[column.title] = column.narrowest + more
        left -= more
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column in shown:
        table.add_column(
            column.title,
            no_wrap=column.wraps_at is None or column.crops,
            justify=column.justify,
            overflow="ellipsis" if column.crops else "fold",
            width=sizes[column.title],
        )
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    return table


def print_columns(out: Console, shown: Sequence[Column], width: int) -> None:
    """Print columns that `fit`. In a pipe, lines end where their text does."""
    table = make_table(shown, width)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    out.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())
