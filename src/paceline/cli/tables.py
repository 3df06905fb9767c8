"""Tables that fit the terminal: columns that matter least drop out, long texts wrap, and in a pipe nothing is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import zip_longest
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
    """Print columns that `fit`, as a table of rich would, but thousands of rows in no time.

    In a pipe, lines end where their text does.
    """
    painters = [
        _Painter(out, column, size)
        for column, size in zip(shown, _sizes(shown, width), strict=True)
    ]
    painted = [painter.paint_all() for painter in painters]
    gap, blanks = " " * GAP, [" " * painter.size for painter in painters]
    lines: list[str] = []
    for row in zip(*painted, strict=True):
        if {*map(len, row)} == {1}:
            lines.append(gap.join([line for (line,) in row]))
            continue
        for parts in zip_longest(*row):
            lines.append(
                gap.join(
                    blank if part is None else part
                    for part, blank in zip(parts, blanks, strict=True)
                )
            )
    if not out.is_terminal:
        lines = [line.rstrip() for line in lines]
    out.file.write("\n".join(lines) + "\n")


class _Painter:
    """Turns the cells of a column into lines of its width. Most cells are plain and short."""

    def __init__(self, out: Console, column: Column, size: int) -> None:
        self.column, self.size = column, size
        self._out = out

    def paint_all(self) -> list[list[str]]:
        """Return the lines of the title and of each cell. Many cells are equal."""
        cells = [f"[dim]{self.column.title}[/]", *self.column.cells]
        painted = {cell: self._paint(cell) for cell in {*cells}}
        return [painted[cell] for cell in cells]

    def _paint(self, cell: str) -> list[str]:
        if _is_plain(cell) and len(cell) <= self.size:
            return [
                cell.rjust(self.size) if self.column.justify == "right" else cell.ljust(self.size)
            ]
        return list(self._lines(cell))

    def _lines(self, cell: str) -> Iterator[str]:
        text, cut = _text(cell), self.column.wraps_at is None or self.column.crops
        wrapped = text.wrap(
            self._out,
            self.size,
            justify=self.column.justify,
            no_wrap=cut,
            overflow="ellipsis" if self.column.crops else "fold",
        )
        for line in wrapped:
            line.truncate(self.size, overflow="ellipsis" if self.column.crops else "fold", pad=True)
            with self._out.capture() as printed:
                self._out.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
            yield printed.get()


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
