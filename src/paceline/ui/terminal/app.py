"""The program behind `paceline top`: panes, keys, and the threads that read.

A thread that is stuck in a dead file system keeps neither the screen from answering nor the program
from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import DescendantBlur, DescendantFocus
from textual.message import Message
from textual.widgets import Input, Static

from paceline.contract.run_folder import RunFolder
from paceline.errors import PacelineError
from paceline.spec.shell_text import quote, to_type
from paceline.ui.actions import Question, act, find_question
from paceline.ui.run_reader import News, RunList, RunReader, Wanted
from paceline.ui.terminal.facts import heading
from paceline.ui.terminal.panes import (
    CurvePane,
    FactsPane,
    LogPane,
    Rule,
    RunTable,
    Titles,
    sweep_facts,
    sweep_heading,
)
from paceline.ui.terminal.rows import Row, list_title, log_title
from paceline.ui.terminal.screens import CSS, NO_RUNS, Asking, Help, key_line
from paceline.ui.text import plain
from paceline.watch import origin
from paceline.watch.metrics import Curve
from paceline.watch.records import QueryStates
from paceline.watch.scheduler import query_states

LIST_INTERVAL, RUN_INTERVAL = 5.0, 1.0  # seconds
IDLE_SHARE = 60  # a read that takes CPU time is followed by a pause of so many times that
SEARCH, FILTER = "search the log: ", "filter runs: "
# What every run logs about itself comes after the script's own metrics.
COMMON = frozenset(
    {"seconds", "data_wait", "samples_per_second", "tokens_per_second", "peak_memory", "mfu", "lr"}
)


class Done(Message):
    """What a thread has read: the screen shows it."""

    def __init__(self, show: Callable[[], None]) -> None:
        self.show = show
        super().__init__()


class Poller:
    """Calls a function again and again in a thread, less often if a call costs much."""

    def __init__(self, work: Callable[[], None], interval: float, name: str) -> None:
        self._work, self._interval = work, interval
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"paceline-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Call the function now."""
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.clear()
            began = time.thread_time()
            self._work()
            self._wanted.wait(max(self._interval, IDLE_SHARE * (time.thread_time() - began)))


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

    def __init__(self, scratch: Path, *, query: QueryStates = query_states) -> None:
        super().__init__(ansi_color=True)  # or Textual makes everything black with NO_COLOR
        self.scratch, self._query_states = scratch, query
        self._list = RunList(scratch, query)
        # the path of the selected run, and what to search its log for
        self._wanted: tuple[str, str] | None = None
        self._reader: RunReader | None = None
        self._read_what: tuple[str, str] | None = None
        self._drawn: list[str] = []  # the names of the curves that are drawn
        self._is_filter = False  # what is typed; or else a search
        # Kept, since a query finds only what is on the topmost screen.
        self._title_line = Static("", id="title", markup=False)
        self._table = RunTable("runs")
        self._heading, self._log_heading = Rule("heading"), Rule("log-heading")
        self._curves, self._facts = CurvePane("curves"), FactsPane("facts")
        self._log_pane = LogPane("log")
        self._prompt = Static("", id="prompt", markup=False)
        self._input = Input(id="input", compact=True)
        self._key_line = Static(key_line(), id="keys", markup=False)
        self._pollers = (
            Poller(self._read_list, LIST_INTERVAL, "list"),
            Poller(self._read_run, RUN_INTERVAL, "run"),
        )

    # -- layout ------------------------------------------------------------------------------------

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
        self._table.refresh()

    # -- what the threads do -----------------------------------------------------------------------

    def _read_list(self) -> None:
        def read() -> Callable[[], None]:
            found = self._list.read()

            def show() -> None:
                self._table.show(found)
                self._show_title()
                if not found.runs and not found.sweeps:
                    self._facts.show_text(Text(NO_RUNS.format(plain(origin.place(self.scratch)))))

            return show

        self._guarded(read)

    def _read_run(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        if self._reader is None or self._read_what != wanted:
            folder = RunFolder(Path(wanted[0]))
            self._reader = RunReader(folder, self._query_states, Wanted(grep=wanted[1]))
            self._read_what, self._drawn = wanted, []
        reader = self._reader

        def read() -> Callable[[], None]:
            news = reader.read()
            known = ordered(reader.curves.all.names)
            names = known[(first := self._curves.first % max(1, len(known))) : first + 1]
            is_same = names == self._drawn and not news.curves
            curves = None if is_same else [reader.curves.all.curve(name) for name in names]
            self._drawn = names
            return lambda: self._show_run(wanted, news, curves)

        self._guarded(read)

    def _guarded(self, read: Callable[[], Callable[[], None]]) -> None:
        """Let the screen show what was read. A problem ends neither the thread nor the program."""
        try:
            show = read()
        # a file that no one has foreseen must not end the view of all others
        except Exception as error:
            known = isinstance(error, (PacelineError, OSError))
            text = str(error) if known else f"{type(error).__name__}: {error}"
            show = partial(self.say, text, is_problem=True)
        with suppress(RuntimeError):  # the program has ended meanwhile
            self.post_message(Done(show))

    def on_done(self, message: Done) -> None:
        message.show()

    def _show_run(self, wanted: tuple[str, str], news: News, curves: list[Curve] | None) -> None:
        if wanted != self._wanted:
            return  # the user has gone on meanwhile
        if news.details is not None:
            self._table.update_run(news.details.overview)
            self._show_title()
            self._heading.show(heading(news.details.overview))
            self._facts.show(news.details)
        if curves is not None:
            self._curves.show(curves)
        if news.whole_log or news.lines:
            self._log_pane.show(news.lines, anew=news.whole_log, searched=wanted[1])
            self._show_log_title()

    # -- the selection -----------------------------------------------------------------------------

    def on_run_table_selected(self, message: RunTable.Selected) -> None:
        row = message.row
        if row is None or row.run is None:
            self._wanted = None
            self._clear()
            self._show_sweep(row)
        elif self._wanted is None or self._wanted[0] != row.run.path:
            self._want(row.run.path, "")

    def _show_sweep(self, row: Row | None) -> None:
        if row is not None:
            self._heading.show(sweep_heading(row))
            self._curves.show([], without="space: its trials")
            self._facts.show_text(sweep_facts(row))

    def _want(self, path: str, searched: str) -> None:
        """Let the thread read a run, or search its log."""
        if self._wanted is None or self._wanted[0] != path:
            self._clear()
        self._wanted = (path, searched)
        self._pollers[1].hurry()

    @property
    def _searched(self) -> str:
        return self._wanted[1] if self._wanted is not None else ""

    def _clear(self) -> None:
        self._heading.show(Text())
        self._curves.show([])
        self._facts.show(None)
        self._facts.show_text(Text())
        self._facts.scroll_home(animate=False)
        self._log_pane.show([], anew=True)
        self._show_log_title()

    # -- keys --------------------------------------------------------------------------------------

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_metric(self) -> None:
        self._curves.first += 1
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
        self._prompt.update(what)
        self._is_filter = what == FILTER
        self._input.value = value
        self._main.add_class("-typing")
        self._input.focus()

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

    def action_ask(self, verb: str) -> None:
        row = self._table.row
        if row is None:
            self.say("Select a run first.")
        elif row.run is None:
            command = to_type(f"sweep cancel {quote(row.name)}")
            self.say(f"Press space and select a trial. `{command}` cancels all of them.")
        elif isinstance(found := find_question(verb, row.run), str):
            self.say(found)
        else:
            self.push_screen(Asking(found), self._answered(found))

    def _answered(self, question: Question) -> Callable[[Any], None]:
        def work_and_look() -> None:
            folder = RunFolder(Path(question.run.path))

            def work() -> Callable[[], None]:
                said = act(folder, question.verb)
                return lambda: self.say(said)

            self._guarded(work)
            self._pollers[0].hurry()

        def answered(yes: bool | None) -> None:
            self.say("…" if yes else "Nothing was done.")
            if yes:
                threading.Thread(target=work_and_look, name="paceline-action", daemon=True).start()

        return answered

    # -- lines of text -----------------------------------------------------------------------------

    def say(self, text: str, *, is_problem: bool = False) -> None:
        """Show a message instead of the keys, until another key is pressed."""
        self._key_line.update(Text(plain(text), "bold red" if is_problem else "bold"))

    def on_key(self) -> None:
        self._key_line.update(key_line())

    def _show_title(self) -> None:
        table = self._table
        self._title_line.update(list_title(table.found.runs, table.wanted, self.scratch))

    def _show_log_title(self) -> None:
        self._log_heading.show(log_title(self._log_pane.count(), self._searched))


def ordered(names: Sequence[str]) -> list[str]:
    """Return the names of metrics, the loss first."""
    return sorted(names, key=lambda name: (name in COMMON, "loss" not in name.lower()))
