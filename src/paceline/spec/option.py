"""Settings as flags: the `Option` beside each key's type, and the `Flag` that somebody typed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from paceline.errors import UsageError

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


@dataclass(frozen=True)
class Flag:
    """A value from the command line: the flag, the key it sets ("job.nodes"), and the value."""

    name: str
    key: str
    value: Any
    path: str = ""  # PATH, NAME_OR_PATH, PROGRAM, BIND or FOLDER


def read_flags(typed: Iterable[tuple[Option, Any]], environ: Mapping[str, str]) -> list[Flag]:
    """Return what was typed as flags, with the values that they imply; None and [] were not
    typed.
    """
    flags: dict[str, Flag] = {}
    implied: list[Flag] = []
    for option, value in typed:
        if value is None or value == []:
            continue
        name = option.negative if value is False else option.name
        flag = Flag(name, option.key, _value(option, value, environ), option.path)
        if option.key in flags:
            raise _contradiction(flags[option.key], flag)
        flags[option.key] = flag
        if option.implies is not None and value is not False:
            implied.append(Flag(flag.name, *option.implies))
    for flag in implied:
        known = flags.setdefault(flag.key, flag)
        if known.value != flag.value:
            raise _contradiction(known, flag)
    return list(flags.values())


def _contradiction(first: Flag, second: Flag) -> UsageError:
    return UsageError(f"{first.name} and {second.name} conflict.", hint="Use only one of them.")


def _value(option: Option, value: Any, environ: Mapping[str, str]) -> Any:
    if option.kind == NUMBER and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
        number = int(value)
        if number < 0 < option.plus:  # what follows would show the number with what is added
            raise UsageError(f"Invalid {option.name} {number}: use at least 0.")
        return number + option.plus
    if option.kind == TEXT and re.fullmatch(r"--[a-z][a-z-]*", value):
        raise UsageError(
            f"{option.name} needs a value, but {value} follows it.",
            hint=f"Type it as {option.name} {option.metavar}.",
        )
    if option.kind == SWITCH and value:
        return option.sets
    return _variables(value, environ) if option.kind == VARIABLES else value


def _variables(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse `K=V`; a `K` alone takes the value that it has here."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise UsageError(
                f"Invalid --env {name}: the variable is not set here.",
                hint=f"Use --env {name}=VALUE.",
            )
        variables[name] = value if equals else environ[name]
    return variables


def absolute_paths(value: Any, kind: str, folder: str) -> Any:
    """Return a path, or a list of some, with relative ones taken from `folder`."""
    if not isinstance(value, str):
        return [absolute_paths(each, kind, folder) for each in value]
    path, colon, inside = value.partition(":") if kind == BIND else (value, "", "")
    found = os.path.join(folder, path)
    is_name = (kind == PROGRAM and "/" not in value) or (
        kind == NAME_OR_PATH and not os.path.exists(found)
    )
    if is_name or value.startswith(("/", "~", "$")):
        return value
    return os.path.normpath(found) + colon + inside
