"""The panes of the screen: the table of runs, the log, and the selected run's heading, curves and facts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from paceline.spec.shell_text import quote, to_type
from paceline.ui.run_reader import MAX_LINES, Found
from paceline.ui.terminal.facts import facts, plot
from paceline.ui.terminal.rows import Row, arrange, fit, row_line, status_style, title_line
from paceline.ui.text import plain
from paceline.watch.details import RunDetails
from paceline.watch.metrics import Curve, short_number
from paceline.watch.overview import Overview
from paceline.watch.run_log import LogLine

STYLES = ("cyan", "magenta", "green", "yellow")
RANK_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


class Lines(ScrollView, can_focus=True):
    """Subclasses say how many lines there are and what each of them looks like."""

    DEFAULT_CSS = """
    Lines { background: ansi_default; scrollbar-size-vertical: 1; overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+b", "move_page(-1)", show=False),
        Binding("pagedown,ctrl+f", "move_page(1)", show=False),
        Binding("home,g", "move_to(0)", show=False),
        Binding("end,G", "move_to(-1)", show=False),
    ]

    def count(self) -> int:
        raise NotImplementedError

    def line(self, index: int, width: int) -> Text:
        raise NotImplementedError

    def update_size(self) -> None:
        self.virtual_size = Size(self.scrollable_content_region.width, self.count())

    def on_resize(self, event: Resize) -> None:
        self.update_size()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, index = self.scrollable_content_region.width, self.scroll_offset.y + y
        if index >= self.count() or width <= 0:
            return Strip.blank(width, self.rich_style)
        text = self.line(index, width)
        text.truncate(width, overflow="ellipsis", pad=True)
        return Strip(text.render(self.app.console), width).apply_style(self.rich_style)

    def action_move(self, by: int) -> None:
        self.scroll_relative(y=by, animate=False)

    def action_move_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def action_move_to(self, index: int) -> None:
        self.scroll_to(y=0 if index == 0 else self.count(), animate=False)


class LogPane(Lines):
    """Follows the end of the log, unless the user has scrolled up."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self.searched = ""
        self._follows = True

    def show(self, lines: Sequence[LogLine], *, anew: bool, searched: str = "") -> None:
        """Add lines, or show these instead of the old ones."""
        self.searched = searched
        if not lines and not anew:
            return
        if anew:
            self.lines.clear()
            self._follows = True
        self.lines.extend(lines)
        self.update_size()
        self.refresh()
        if self._follows:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        # A pane that becomes higher moves up to its new end: whoever was there still is.
        self._follows = new_value >= self.max_scroll_y

    def on_resize(self, event: Resize) -> None:
        super().on_resize(event)
        if self._follows:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True)

    def count(self) -> int:
        return len(self.lines)

    def line(self, index: int, width: int) -> Text:
        line = self.lines[index]
        text = Text()
        if line.time is not None and width >= 60:
            text.append(time.strftime("%H:%M:%S ", time.localtime(line.time)), "dim")
        if line.rank is not None:
            text.append(f"{line.rank:>3} ", RANK_COLOURS[line.rank % len(RANK_COLOURS)])
        text.append(plain(line.text))
        if self.searched:
            text.highlight_words([self.searched], "reverse yellow")
        return text


class Rule(Widget):
    """A heading that a line follows to the edge. Bold while the pane below it has the focus."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.text = Text()

    def show(self, text: Text) -> None:
        if text != self.text:
            self.text = text
            self.refresh()

    def render(self) -> Text:
        width, active = self.size.width, self.has_class("-active")
        text = Text.assemble(
            ("━━ " if active else "── ", "cyan" if active else "dim"), self.text, " "
        )
        text.truncate(width, overflow="ellipsis")
        return text.append(
            ("━" if active else "─") * max(0, width - text.cell_len), "cyan" if active else "dim"
        )


class CurvePane(Widget):
    """One metric."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.curves: list[Curve] = []
        self._without = ""
        self.first = 0  # the metric to draw, in the order of `ordered`

    def show(self, curves: Sequence[Curve], without: str = "no metrics yet") -> None:
        """Show a curve, or a text if there is none."""
        self.curves, self._without = list(curves), without
        self.refresh()

    def render(self) -> Text:
        if not self.curves:
            return Text(self._without, "dim")
        style = STYLES[self.first % len(STYLES)]
        return plot(self.curves[0], self.size.width - 1, self.size.height, style=style)


class FactsPane(VerticalScroll):
    """Everything else about the run. Scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.details: RunDetails | None = None
        self.whole = False
        self._content = Static("", markup=False)
        self._shown = Text()

    def compose(self) -> ComposeResult:
        yield self._content

    def show(self, details: RunDetails | None) -> None:
        self.details = details
        self.draw()

    def show_text(self, text: Text) -> None:
        if text != self._shown or text.spans != self._shown.spans:
            self._shown = text
            self._content.update(text)

    def draw(self) -> None:
        if self.details is not None:
            width = max(20, self.size.width - 2)
            self.show_text(facts(self.details, width, whole=self.whole))

    def on_resize(self, event: Resize) -> None:
        self.draw()


def sweep_heading(row: Row) -> Text:
    status = (plain(row.status), f"bold {status_style(row.status, over=row.is_over)}")
    return Text.assemble((plain(row.name), "bold"), "  ", status, "  ", ("sweep", "dim"))


def sweep_facts(row: Row) -> Text:
    """Return what is known about a sweep: how many trials are how far, and the best one."""
    sweep = row.sweep
    assert sweep is not None
    lines = [Text.assemble(("trials   ", "dim"), f"{sweep.trials}: {plain(row.counts)}")]
    if sweep.best is not None:
        best = f"{plain(sweep.metric)} {short_number(sweep.best)}, trial {sweep.best_trial}"
        lines.append(Text.assemble(("best     ", "dim"), (best, "bold green")))
    command = plain(to_type(f"sweep show {quote(row.name)}"))
    lines.append(Text.assemble(("more     ", "dim"), (command, "cyan")))
    return Text("\n").join(lines)


# -- the table of runs -----------------------------------------------------------------------------


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
