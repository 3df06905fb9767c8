"""The panes of the selected run: its heading, its curves and its facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Static

from paceline.contract.quote import quote
from paceline.contract.typed_command import to_type
from paceline.ui.terminal.plots import short_number
from paceline.ui.terminal.top.data.rows import Row
from paceline.ui.terminal.top.data.selected_run import Choice
from paceline.ui.terminal.top.text.columns import status_style
from paceline.ui.terminal.top.text.curve import plot
from paceline.ui.terminal.top.text.facts import facts
from paceline.ui.terminal.top.text.words import plain
from paceline.watch.curves import Curve
from paceline.watch.details import RunDetails

# lines of a plot that shares the pane with others, and how many there may be
MIN_PLOT, MAX_PLOTS = 9, 4
STYLES = ("cyan", "magenta", "green", "yellow")


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
    """One metric, or several if there is room."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.curves: list[Curve] = []
        self._without = ""
        self.choice = Choice()

    def show(self, curves: Sequence[Curve], without: str = "no metrics yet") -> None:
        """Show these curves, or a text if there are none."""
        self.curves, self._without = list(curves), without
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        self.choice.count = max(1, min(self.size.height // MIN_PLOT, MAX_PLOTS))

    def render(self) -> Text:
        if not self.curves:
            return Text(self._without, "dim")
        height, shown = self.size.height, self.curves[: self.choice.count]
        room = [
            height // len(shown) + (number < height % len(shown)) for number in range(len(shown))
        ]
        plots = [
            plot(
                curve,
                self.size.width - 1,
                lines,
                style=STYLES[(self.choice.first + number) % len(STYLES)],
            )
            for number, (curve, lines) in enumerate(zip(shown, room, strict=True))
        ]
        return Text("\n").join(plots)


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
    """Return what is known about a sweep: how many trials are how far, and the best ones."""
    lines = [Text.assemble(("trials   ", "dim"), f"{row.count}: {plain(row.counts)}")]
    if row.sweep is not None and row.sweep.best is not None:
        best = f"{plain(row.sweep.metric)} {short_number(row.sweep.best)}, trial {row.sweep.best_trial}"
        lines.append(Text.assemble(("best     ", "dim"), (best, "bold green")))
    scored = sorted(
        (run for run in row.trials if run.loss is not None), key=lambda run: run.loss or 0.0
    )
    for number, run in enumerate(scored[:20]):
        label = "lowest" if number == 0 else ""
        value = f"{plain(run.loss_name)} {short_number(run.loss or 0.0)}"
        lines.append(
            Text.assemble(
                (f"{label:<9}", "dim"), f"trial {run.trial}  {value}  ", (plain(run.status), "dim")
            )
        )
    lines.append(
        Text.assemble(
            ("more     ", "dim"), (plain(to_type(f"sweep show {quote(row.name)}")), "cyan")
        )
    )
    return Text("\n").join(lines)
