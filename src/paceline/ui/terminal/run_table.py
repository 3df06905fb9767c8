"""The table of runs, with one row selected."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static

from paceline.ui.run_reader import Found
from paceline.ui.terminal.panes import Lines
from paceline.ui.terminal.rows import Row, arrange, fit, row_line, title_line
from paceline.watch.overview import Overview

SCROLLBAR = 1  # a column that is left free, also without one: titles and rows have the same columns


class Titles(Static):
    """The line above the table."""

    def render(self) -> Text:
        return title_line(fit(self.size.width - SCROLLBAR))


class RunTable(Lines):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", show=False),
        Binding("space", "fold", show=False),
        Binding("right,l", "fold(True)", show=False),
        Binding("left,h", "fold(False)", show=False),
    ]

    class Selected(Message):
        """Another row is selected, or the selected one has changed."""

        def __init__(self, row: Row | None) -> None:
            self.row = row
            super().__init__()

    class Opened(Message):
        """The user wants to see all of the selected run."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.rows: list[Row] = []
        self.found = Found()
        self.wanted = ""  # the filter
        self.cursor = 0
        self.unfolded: set[str] = set()

    @property
    def row(self) -> Row | None:
        return self.rows[self.cursor] if self.rows else None

    def show(self, found: Found) -> None:
        """Show these runs. The selection stays on its run, wherever that is now."""
        self.found = found
        self._arrange()

    def update_run(self, run: Overview) -> None:
        """Show newer numbers of a run that is in the list, without selecting anything."""
        known = [run if each.path == run.path else each for each in self.found.runs]
        self.found = replace(self.found, runs=known)
        for number, row in enumerate(self.rows):
            if row.run is not None and row.run.path == run.path and row.run != run:
                self.rows[number] = replace(row, run=run)
                self.refresh()

    def filter(self, wanted: str) -> None:
        self.wanted = wanted
        self._arrange()

    def count(self) -> int:
        return len(self.rows)

    def line(self, index: int, width: int) -> Text:
        text = row_line(self.rows[index], fit(self.size.width - SCROLLBAR))
        if index != self.cursor:
            return text
        flat = Text(text.plain)  # colours would be hard to read on the bar
        flat.truncate(width, pad=True)
        flat.stylize("reverse" if self.has_focus else "bold")
        return flat

    def action_move(self, by: int) -> None:
        self.select(self.cursor + by)

    def action_move_to(self, index: int) -> None:
        self.select(index if index >= 0 else len(self.rows) - 1)

    def action_open(self) -> None:
        if self.row is not None and self.row.run is None:
            self.action_fold()
        elif self.row is not None:
            self.post_message(self.Opened())

    def action_fold(self, unfold: bool | None = None) -> None:
        """Show or hide the trials of the selected sweep."""
        row = self.row
        if row is None or (row.run is not None and not row.is_trial):
            return
        key = row.key.rpartition("/trials/")[0] if row.is_trial else row.key
        unfold = key not in self.unfolded if unfold is None else unfold
        (self.unfolded.add if unfold else self.unfolded.discard)(key)
        self._arrange(row.key if row.is_trial and unfold else key)

    def select(self, index: int) -> None:
        before = self.cursor
        self.cursor = min(max(0, index), max(0, len(self.rows) - 1))
        self.refresh()
        self._scroll_to_cursor()
        if self.cursor != before:
            self.post_message(self.Selected(self.row))

    def _arrange(self, key: str = "") -> None:
        old = self.row
        key = key or (old.key if old is not None else "")
        self.rows = arrange(
            self.found.runs, self.found.sweeps, unfolded=self.unfolded, wanted=self.wanted
        )
        found = (number for number, row in enumerate(self.rows) if row.key == key)
        self.cursor = next(found, min(self.cursor, max(0, len(self.rows) - 1)))
        self.update_size()
        self.refresh()
        self._scroll_to_cursor()
        if self.row != old:
            self.post_message(self.Selected(self.row))

    def _scroll_to_cursor(self) -> None:
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if not top <= self.cursor < top + height:
            wanted = self.cursor if self.cursor < top else self.cursor - height + 1
            self.scroll_to(y=wanted, animate=False, immediate=True)
