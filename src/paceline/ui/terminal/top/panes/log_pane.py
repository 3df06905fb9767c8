"""The output of the selected run as it is written, with search."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.text import Text
from textual.events import Resize

from paceline.ui.terminal.top.data.selected_run import MAX_LINES
from paceline.ui.terminal.top.panes.lines import Lines
from paceline.ui.terminal.top.text.words import plain
from paceline.watch.run_log import LogLine

RANK_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


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
        start = len(text)
        text.append(plain(line.text))
        if self.searched:
            at = text.plain.find(self.searched, start)
            while at >= 0:
                text.stylize("reverse yellow", at, at + len(self.searched))
                at = text.plain.find(self.searched, at + len(self.searched))
        return text
