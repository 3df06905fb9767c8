"""What the threads that read send to the screen."""

from __future__ import annotations

from textual.message import Message

from paceline.ui.terminal.top.data.reader import Found
from paceline.ui.terminal.top.data.selected_run import News


class RunsRead(Message):
    def __init__(self, found: Found) -> None:
        self.found = found
        super().__init__()


class RunRead(Message):
    def __init__(self, news: News, is_own: bool) -> None:
        self.news, self.is_own = news, is_own
        super().__init__()


class Said(Message):
    """Something to tell the user."""

    def __init__(self, text: str, *, is_problem: bool = False) -> None:
        self.text, self.is_problem = text, is_problem
        super().__init__()
