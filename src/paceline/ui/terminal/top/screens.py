"""What the user reads about keys, and what lies over the panes for a moment: help, and questions."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

KEYS = (
    ("⏎", "open"),
    ("⇥", "pane"),
    ("/", "search"),
    ("f", "filter"),
    ("s", "stop"),
    ("c", "cancel"),
    ("r", "requeue"),
    ("?", "help"),
    ("q", "quit"),
)
NO_RUNS = """\
No runs in {}.

Start one, and it appears here:
  paceline run train.py
  paceline submit --gpus 8 train.py"""
HELP = """\
[Runs]  running, then queued, then finished
  up, down, j, k  select a run       g, G    first, last
  enter           see all of a run   escape  back to the list
  space, l, h     unfold a sweep to see its trials, or fold it
  f               filter by words of name, project, sweep, status, job
[The selected run]
  tab             go from the list to the facts and to the log
  m               draw the next metric
  /               search the log; escape shows all lines again
[Do something]  you are asked before anything happens
  s               save a checkpoint and stop
  c               cancel: steps since the last checkpoint are lost
  r               save a checkpoint and requeue; a finished run
                  continues as a new job
[What the words mean]
  LEFT            until the last step; ~ when a queued job may start
  GOODPUT         share of the time that went into steps that count
  slow            a rank that others wait for: paceline doctor RUN

Escape or ? closes this, q leaves. Your runs keep running.
"""


def key_line() -> Text:
    return Text("  ").join(
        Text.assemble((key, "bold cyan"), (f" {what}", "dim")) for key, what in KEYS
    )


def help_text() -> Text:
    """Return the help, with the parts in brackets in bold."""
    text = Text()
    for number, part in enumerate(HELP.replace("]", "[").split("[")):
        text.append(part, "bold cyan" if number % 2 else "")
    return text


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box help"):
            yield Static(help_text())

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


class Question(ModalScreen[bool]):
    """Asks before something happens. Without a clear yes, nothing does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,q", "answer(False)", show=False),
        Binding("left,right,h,l,up,down", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, consequence: str, yes: str) -> None:
        super().__init__()
        self.question, self.consequence, self.yes = question, consequence, yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(
                Text.assemble((self.question, "bold"), "\n\n", self.consequence), id="question"
            )
            with Horizontal(id="answers"):
                yield Button(Text("No, leave it (n)"), id="no", compact=True)
                yield Button(Text(f"{self.yes} (y)"), id="yes", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
