"""Tables that fit the terminal: columns that matter least drop out, long texts wrap, and in a pipe nothing is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
        return max(_width(text) for text in {self.title, *self.cells})

    @property
    def narrowest(self) -> int:
        return self.widest if self.wraps_at is None else min(self.widest, self.wraps_at)

    @property
    def comfortable(self) -> int:
        return self.narrowest if self.wraps_at is None else min(self.widest, self.wraps_well_at)


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and those that drop out. Empty columns take no room."""
    shown = [column for column in columns if column.rank == KEPT or any(column.cells)]
    while _total(column.comfortable for column in shown) > width and any(
        column.optional for column in shown
    ):
        shown.remove(
            max((column for column in shown if column.optional), key=lambda column: column.rank)
        )
    while _total(column.narrowest for column in shown) > width:
        last = max(shown, key=lambda column: column.rank)
        if last.rank == KEPT:
            break
        shown.remove(last)
    return shown, [column for column in columns if column not in shown and any(column.cells)]


def _total(sizes: Iterable[int]) -> int:
    return sum(size + GAP for size in sizes) - GAP


def make_table(shown: Sequence[Column], width: int) -> Table:
    """Return a table of columns that `fit`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column, size in zip(shown, _sizes(shown, width), strict=True):
        table.add_column(
            column.title,
            no_wrap=column.wraps_at is None or column.crops,
            justify=column.justify,
            overflow="ellipsis" if column.crops else "fold",
            width=size,
        )
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    return table


def _sizes(shown: Sequence[Column], width: int) -> list[int]:
    """Return the width of each column. Room goes to short texts that are cut, to those that wrap, then to long ones."""
    sizes = [column.narrowest for column in shown]
    left = max(0, width - _total(sizes))
    wanted = [(index, column.comfortable) for index, column in enumerate(shown) if column.crops]
    wanted += sorted(
        ((index, column.widest) for index, column in enumerate(shown)),
        key=lambda each: shown[each[0]].crops,
    )
    for index, size in wanted:
        more = min(left, max(0, size - sizes[index]))
        sizes[index] += more
        left -= more
    return sizes


def print_columns(out: Console, shown: Sequence[Column], width: int) -> None:
    """Print columns that `fit`. In a pipe, lines end where their text does."""
    table = make_table(shown, width)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    lines = [line.rstrip() for line in printed.get().splitlines()]
    out.file.write("\n".join(lines) + "\n")


def _is_plain(cell: str) -> bool:
    """Return whether a cell is printed as it stands, with one column per character."""
    return cell.isascii() and "[" not in cell and "\\" not in cell


def _width(cell: str) -> int:
    return len(cell) if _is_plain(cell) else _marked_width(cell)


@lru_cache(maxsize=4096)
def _marked_width(cell: str) -> int:
    from rich.cells import cell_len

    return cell_len(_text(cell).plain)


def _text(cell: str) -> Text:
    from rich.text import Text

    return Text.from_markup(cell)
