"""What was typed, as flags: each with the key that it sets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.spec.option import (
    BIND,
    NAME_OR_PATH,
    NUMBER,
    PROGRAM,
    SWITCH,
    TEXT,
    VARIABLES,
    Option,
)


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
        return int(value) + option.plus
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
