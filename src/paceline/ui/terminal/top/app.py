"""The program behind `paceline top`: panes, keys, and the threads that read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import DescendantBlur, DescendantFocus
from textual.message import Message
from textual.widgets import Input, Static

from paceline.contract.files.file_owner import is_own_folder
from paceline.errors import PacelineError
from paceline.ui.terminal.top.actions import Action, find_action
from paceline.ui.terminal.top.data.reader import Poller, RunList
from paceline.ui.terminal.top.data.rows import Row
from paceline.ui.terminal.top.data.selected_run import SelectedRun
from paceline.ui.terminal.top.messages import RunRead, RunsRead, Said
from paceline.ui.terminal.top.panes.log_pane import LogPane
from paceline.ui.terminal.top.panes.run_panes import (
    CurvePane,
    FactsPane,
    Rule,
    sweep_facts,
    sweep_heading,
)
from paceline.ui.terminal.top.panes.run_table import RunTable, Titles
from paceline.ui.terminal.top.screens import NO_RUNS, Help, Question, key_line
from paceline.ui.terminal.top.style import CSS
from paceline.ui.terminal.top.text.facts import heading
from paceline.ui.terminal.top.text.titles import list_title, log_title
from paceline.ui.terminal.top.text.words import plain
from paceline.watch import origin
from paceline.watch.details import RunDetails
from paceline.watch.records import QueryStates
from paceline.watch.scheduler import query_states

LIST_INTERVAL, RUN_INTERVAL = 5.0, 1.0  # seconds
SEARCH, FILTER = "search the log: ", "filter runs: "


class TopApp(App[None]):
    CSS = CSS
    TITLE = "paceline top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", show=False),
        Binding("question_mark", "help", show=False),
        Binding("slash", "search", show=False),
        Binding("f", "filter", show=False),
        Binding("m", "metric", show=False),
        Binding("s", "ask('stop')", show=False),
        Binding("c", "ask('cancel')", show=False),
        Binding("r", "ask('requeue')", show=False),
        Binding("escape", "leave", show=False),
    ]

    def __init__(
        self, scratch: Path, *, wanted: str = "", query: QueryStates = query_states
    ) -> None:
        super().__init__(ansi_color=True)  # or Textual makes everything black with NO_COLOR
        self.scratch, self._query_states = scratch, query
        self._first_filter = wanted
        self._list = RunList(scratch, query)
        # the path of the selected run, and what to search for
        self._wanted: tuple[str, str] | None = None
        self._selected: SelectedRun | None = None
        self._is_own: bool | None = None  # None until the selected run has been read
        self._asked = ""  # the action to ask about once it has been
        self._searched = ""
        self._is_filter = False  # what is typed; or else a search
        # Kept, since a query finds only what is on the topmost screen.
        self._title_line = Static("", id="title", markup=False)
        self._table = RunTable("runs")
        self._heading, self._log_heading = Rule("heading"), Rule("log-heading")
        self._curves, self._facts, self._log_pane = (
            CurvePane("curves"),
            FactsPane("facts"),
            LogPane("log"),
        )
        self._prompt = Static("", id="prompt", markup=False)
        self._input = Input(id="input", compact=True)
        self._key_line = Static(key_line(), id="keys", markup=False)
        self._pollers = (
            Poller(self._read_list, LIST_INTERVAL, "list"),
            Poller(self._read_run, RUN_INTERVAL, "run"),
        )

    # -- layout ------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self._title_line
        yield Titles(id="titles")
        yield self._table
        yield self._heading
        yield Horizontal(self._curves, self._facts, id="middle")
        yield self._log_heading
        yield self._log_pane
        yield Horizontal(self._prompt, self._input, id="typing")
        yield self._key_line

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        self._main = self.screen
        self._table.filter(self._first_filter)
        self._table.focus()
        self._show_title()
        self._show_log_title()
        for poller in self._pollers:
            poller.start()

    def on_unmount(self) -> None:
        for poller in self._pollers:
            poller.close()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        self._mark_pane()

    def on_descendant_blur(self, event: DescendantBlur) -> None:
        self._mark_pane()

    def _mark_pane(self) -> None:
        self._heading.set_class(self._facts.has_focus, "-active")
        self._log_heading.set_class(self._log_pane.has_focus, "-active")

    # -- what the threads do -----------------------------------------------------------------------------

    def _read_list(self) -> None:
        self._guarded(lambda: RunsRead(self._list.read()))

    def _read_run(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        path, searched = wanted
        if self._selected is None or (self._selected.path, self._selected.searched) != wanted:
            self._selected = SelectedRun(path, self._query_states, searched=searched)
        selected = self._selected
        self._guarded(
            lambda: RunRead(selected.read(self._curves.choice), is_own_folder(Path(path)))
        )

    def _guarded(self, read: Callable[[], Message]) -> None:
        """Send what was read to the screen. A problem ends neither the thread nor the program."""
        try:
            message = read()
        except (PacelineError, OSError) as error:
            message = Said(str(error), is_problem=True)
        # a file that no one has foreseen must not end the view of all others
        except Exception as error:
            message = Said(f"{type(error).__name__}: {error}", is_problem=True)
        with suppress(RuntimeError):  # the program has ended meanwhile
            self.post_message(message)

    def on_runs_read(self, message: RunsRead) -> None:
        self._table.show(message.found)
        self._show_title()
        if not message.found.runs and not message.found.sweeps:
            self._facts.show_text(Text(NO_RUNS.format(plain(origin.place(self.scratch)))))

    def on_run_read(self, message: RunRead) -> None:
        news = message.news
        if (news.path, news.searched) != self._wanted:
            return  # the user has gone on meanwhile
        self._is_own = message.is_own
        if self._asked:
            self.action_ask(self._asked)
        if news.details is not None:
            self._table.update_run(news.details.overview)
            self._show_title()
            self._show_details(news.details)
        if news.curves is not None:
            self._curves.show(news.curves)
        if news.anew or news.lines:
            self._log_pane.show(news.lines, anew=news.anew, searched=news.searched)
            self._show_log_title()

    def _show_details(self, details: RunDetails) -> None:
        self._heading.show(heading(details.overview))
        self._facts.show(details)

    def on_said(self, message: Said) -> None:
        self.say(message.text, is_problem=message.is_problem)

    # -- the selection -----------------------------------------------------------------------------------

    def on_run_table_selected(self, message: RunTable.Selected) -> None:
        row = message.row
        if row is None or row.run is None:
            self._wanted = None
            self._show_sweep(row)
        elif self._wanted is None or self._wanted[0] != row.run.path:
            self._want(row.run.path, "")
        elif self._selected is not None:  # the list has newer numbers: all panes show the same ones
            self._selected.catch_up()
            self._pollers[1].hurry()

    def _show_sweep(self, row: Row | None) -> None:
        self._clear()
        if row is not None:
            self._heading.show(sweep_heading(row))
            self._curves.show([], without="space: its trials")
            self._facts.show_text(sweep_facts(row))

    def _want(self, path: str, searched: str) -> None:
        """Let the thread read a run, or search its log."""
        if self._wanted is None or self._wanted[0] != path:
            self._clear()
        self._searched, self._wanted = searched, (path, searched)
        self._pollers[1].hurry()

    def _clear(self) -> None:
        self._searched, self._is_own, self._asked = "", None, ""
        self._heading.show(Text())
        self._curves.show([])
        self._facts.show(None)
        self._facts.show_text(Text())
        self._facts.scroll_home(animate=False)
        self._log_pane.show([], anew=True)
        self._show_log_title()

    # -- keys --------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_metric(self) -> None:
        self._curves.choice.first += 1
        self._pollers[1].hurry()

    def on_run_table_opened(self) -> None:
        self._show_whole(True)

    def action_leave(self) -> None:
        """Undo one thing: a search, the view of one run, a filter."""
        table = self._table
        if self._searched and self._wanted is not None:
            self._want(self._wanted[0], "")
        elif self._main.has_class("-whole"):
            self._show_whole(False)
        elif table.wanted:
            table.filter("")
            self._show_title()
        (self._facts if self._main.has_class("-whole") else table).focus()

    def _show_whole(self, whole: bool) -> None:
        """Give the whole screen to the selected run, or show the list again."""
        self._main.set_class(whole, "-whole")
        facts = self._facts
        facts.whole = whole
        facts.draw()
        facts.scroll_home(animate=False)
        (facts if whole else self._table).focus()

    def action_search(self) -> None:
        if self._wanted is not None:
            self._ask_for(SEARCH, self._searched)

    def action_filter(self) -> None:
        self._ask_for(FILTER, self._table.wanted)

    def _ask_for(self, what: str, value: str) -> None:
        field = self._input
        self._prompt.update(what)
        self._is_filter = what == FILTER
        field.value = value
        self._main.add_class("-typing")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._is_filter and self._main.has_class("-typing"):
            self._table.filter(event.value.strip())
            self._show_title()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        table, text = self._table, event.value.strip()
        self._stop_typing()
        if self._is_filter:
            table.filter(text)
            self._show_title()
            table.focus()
        elif self._wanted is not None:
            self._want(self._wanted[0], text)
            self._log_pane.focus()

    def on_input_blurred(self) -> None:
        self._stop_typing()

    def _stop_typing(self) -> None:
        self._main.remove_class("-typing")

    def action_ask(self, kind: str) -> None:
        row = self._table.row
        self._asked = (
            kind if self._is_own is None and row is not None and row.run is not None else ""
        )
        if self._asked:
            self.say("…")
            return
        found = find_action(kind, row, is_own=bool(self._is_own))
        if isinstance(found, str):
            self.say(found)
            return
        act = lambda yes: self._act(found) if yes else self.say("Nothing was done.")  # noqa: E731
        self.push_screen(Question(found.question, found.consequence, found.yes), act)

    def _act(self, action: Action) -> None:
        def act() -> None:
            self._guarded(lambda: Said(action.act()))
            self._pollers[0].hurry()

        self.say("…")
        threading.Thread(target=act, name="paceline-action", daemon=True).start()

    # -- lines of text -----------------------------------------------------------------------------------

    def say(self, text: str, *, is_problem: bool = False) -> None:
        """Show a message instead of the keys, until another key is pressed."""
        self._key_line.update(Text(plain(text), "bold red" if is_problem else "bold"))

    def on_key(self) -> None:
        self._key_line.update(key_line())

    def _show_title(self) -> None:
        self._title_line.update(
            list_title(self._table.found.runs, self._table.wanted, self.scratch)
        )

    def _show_log_title(self) -> None:
        self._log_heading.show(log_title(self._log_pane.count(), self._searched))
