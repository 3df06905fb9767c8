"""How a setting is typed as a flag, and what it means: the `Option` beside each key's type."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from keyword import iskeyword

# Groups, in the order in which `--help` shows them.
SWEEP, RESOURCES, LAUNCH, ENVIRONMENT = "Sweep", "Resources", "Launch", "Environment"
TRAINING, UNTIL_DONE, DATA, TRACKERS = "Training", "Restarts and checkpoints", "Data", "Trackers"
NOTIFICATIONS = "Notifications"
PROJECT, OUTPUT = "Project", "Output"

# Commands that take a group of options.
QUEUE = frozenset({"submit", "sweep", "doctor", "shell"})
RUNS = frozenset({"run", "submit", "sweep", "doctor"})
BATCH = QUEUE - {"shell"}  # what an interactive job cannot do: requeue itself, send mail
ANY = RUNS | QUEUE
PROVABLE = RUNS | {"prove"}  # what also applies to all runs of a proof
BUILD = ANY | {"env"}
NONE: frozenset[str] = frozenset()

TEXT, NUMBER, SWITCH, LIST, VARIABLES = "text", "number", "switch", "list", "variables"
# What is typed is relative to the current folder; a name or path is a path if that exists.
PATH, NAME_OR_PATH = "path", "name or path"
# In a file, these are made absolute too, as jobs start in their run folder: a program (a bare name
# stays), the outside of a bind, a folder.
PROGRAM, BIND, FOLDER = "program", "bind", "folder"


@dataclass(frozen=True)
class Option:
    """What a setting means. `usage` is its flags and the metavar: "-N --nodes N"."""

    usage: str
    help: str
    commands: Set[str] = RUNS
    path: str = ""
    implies: tuple[str, object] | None = None  # another key, and what setting this one makes it
    plus: int = 0  # what is added to a number that is typed: N restarts are N + 1 attempts
    # what a switch makes its key; only one that makes it true can be turned off
    sets: object = True
    group: str = ""  # in --help, if it is not the one of its table
    key: str = ""  # these two follow from where it stands: "job.nodes", and its type
    kind: str = TEXT

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(part for part in self.usage.split() if part.startswith("-"))

    @property
    def name(self) -> str:
        """The flag that messages name; empty if only the file has this key."""
        return next((flag for flag in self.flags if flag.startswith("--")), "")

    @property
    def negative(self) -> str:
        """The flag that turns a switch off."""
        return f"--no-{self.name.removeprefix('--').removeprefix('with-')}"

    @property
    def all_flags(self) -> tuple[str, ...]:
        is_two_way = self.kind == SWITCH and self.sets is True
        return (*self.flags, self.negative) if is_two_way else self.flags

    @property
    def parameter(self) -> str:
        name = self.name.removeprefix("--").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def text(self) -> str:
        """What `--help` says."""
        repeats = self.flags and self.kind in (LIST, VARIABLES)
        return f"{self.help.removesuffix('.')}; repeatable." if repeats else self.help

    @property
    def metavar(self) -> str | None:
        return next((part for part in self.usage.split() if not part.startswith("-")), None)
