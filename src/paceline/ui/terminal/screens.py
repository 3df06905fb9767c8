"""The layout of the screen, its keys, and what lies over it for a moment: help, and questions."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from paceline.ui.actions import Question
from paceline.ui.text import plain

# The colours are the terminal's own: light ones stay light, and sixteen are enough.
CSS = """
Screen { background: ansi_default; color: ansi_default; layout: vertical; }
#title, #titles, #heading, #log-heading, #keys { height: 1; }
#runs { height: 3fr; min-height: 3; }
#middle { height: 4fr; min-height: 5; }
#curves { width: 2fr; height: 100%; }
#facts { width: 3fr; height: 100%; scrollbar-size-vertical: 1; background: ansi_default; }
#facts Static { width: 100%; height: auto; }
#log { height: 3fr; min-height: 3; }
* { scrollbar-color: ansi_cyan; scrollbar-color-hover: ansi_cyan; scrollbar-color-active: ansi_cyan;
    scrollbar-background: ansi_default; scrollbar-background-hover: ansi_default;
    scrollbar-background-active: ansi_default; scrollbar-corner-color: ansi_default; }
#keys { text-wrap: nowrap; text-overflow: ellipsis; }
#typing { display: none; height: 1; }
#prompt { width: auto; text-style: bold; }
#input { width: 1fr; height: 1; border: none; }
.-typing #typing { display: block; }
.-typing #keys { display: none; }
.-whole #titles, .-whole #runs { display: none; }
.-whole #middle { height: 3fr; }
.-whole #log { height: 1fr; }
Help, Asking { align: center middle; background: transparent; }
.box { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: round ansi_cyan;
       background: ansi_default; color: ansi_default; }
.help { padding: 0 1; width: 78; scrollbar-size-vertical: 1; }
#question { width: 100%; height: auto; }
#answers { height: 1; margin-top: 1; }
#answers Button { width: auto; height: 1; border: none; margin-right: 4; background: ansi_default;
                  color: ansi_default; text-style: none; }
#answers Button:focus { text-style: reverse bold; }
"""
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
        Binding("escape,question_mark,q,enter", "dismiss", show=False)
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box help"):
            yield Static(help_text())


class Asking(ModalScreen[bool]):
    """Asks before something happens. Without a clear yes, nothing does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,q", "answer(False)", show=False),
        Binding("left,right,h,l,up,down", "app.focus_next", show=False),
    ]

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            text = (plain(self.question.text), "bold"), "\n\n", plain(self.question.consequence)
            yield Static(Text.assemble(*text), id="question")
            with Horizontal(id="answers"):
                yield Button(Text("No, leave it (n)"), id="no", compact=True)
                yield Button(Text(f"{self.question.yes} (y)"), id="yes", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
