"""A pane of many lines, of which only those in view are drawn."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip


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

    def refresh_index(self, index: int) -> None:
        """Draw one line again."""
        y = index - self.scroll_offset.y
        if 0 <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def action_move(self, by: int) -> None:
        self.scroll_relative(y=by, animate=False)

    def action_move_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def action_move_to(self, index: int) -> None:
        self.scroll_to(y=0 if index == 0 else self.count(), animate=False)
