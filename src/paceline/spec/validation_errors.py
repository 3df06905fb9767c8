"""Validation errors as messages: which key or flag is wrong, its value, and what to use instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.contract.redaction import REDACTED
from paceline.errors import SpecError
from paceline.spec.settings import ACCESS_KEYS, Tables, find_key, is_table

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string, e.g. "text"',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "value_error": "{error}",
}

HIDDEN = {"webhook", "command"}  # keys of [notify] whose wrong values may be secrets


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that a misspelt one most likely means."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else None


def show(value: object) -> str:
    """Return a value as TOML writes it, shortened. Of a table only the keys: the values may be
    secrets.
    """
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(map(str, value))}}}"
    elif isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(show, value))}]"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(error: Mapping[str, Any]) -> str:
    if error["type"] not in _EXPECTED:
        return str(error["msg"])
    text = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
    is_choice = error["type"] == "literal_error"
    return text.replace(" or ", ", ").replace("'", "") if is_choice else text


def _table(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model that a path of keys leads to."""
    model: Any = root
    for key in path:
        model = model.model_fields[key].annotation if key in model.model_fields else None
        if not is_table(model):
            return None
    return model  # type: ignore[no-any-return]


def explain(
    problem: ValidationError,
    *,
    where: str,
    prefix: Sequence[str] = (),
    root: type[BaseModel] = Tables,
) -> SpecError:
    """Return the first problem of a layer as an error. `prefix` is the layer's table in the
    file.
    """
    error = problem.errors(include_url=False)[0]
    path = [str(key) for key in error["loc"]]
    while path and (_table(path[:-1], root) is None):  # inside a value: name the key that holds it
        path.pop()
    full = [*prefix, *path]
    table = f"[{'.'.join(full[:-1])}] of {where}" if len(full) > 1 else where
    if error["type"] == "extra_forbidden":
        model = _table(path[:-1], root) or root
        known = sorted(model.model_fields)
        if model is Tables:
            known += ACCESS_KEYS if prefix else ["profiles"]
        owner = "".join(f"{each}." for each in prefix if root is Tables)
        is_settings = root is Tables or bool(prefix)  # or [sweep], which is beside them
        table_name = full[-2] if path[1:] else ""
        hint = (
            _suggest(full[-1], table_name, known, owner) if is_settings else _near(full[-1], known)
        )
        return SpecError(f"Unknown key {full[-1]!r} in {table}.", hint=hint)
    value = REDACTED if "notify" in full and full[-1] in HIDDEN else show(error["input"])
    return SpecError(f"Invalid {full[-1]} = {value} in {table}: use {_expected(error)}.")


def _near(key: str, known: Sequence[str]) -> str:
    close = nearest(key, known)
    return f"Did you mean {close!r}?" if close else f"Use one of {', '.join(known)}."


def _suggest(key: str, table: str, known: Sequence[str], owner: str) -> str:
    """Return what to use instead of an unknown key: of its own table, or of the one it belongs in.

    `owner` comes before the names of tables: `profiles.alps.`
    """
    models = {name: _table([name], Tables) for name in Tables.model_fields}
    tables = {name: sorted(each.model_fields) for name, each in models.items() if each}
    for name, keys in tables.items():  # often a key is right, but in the wrong table
        if key in keys:
            return f"Move it to [{owner}{name}]."
    if meant := find_key(key):
        name, _, key = meant.partition(".")
        return f"Did you mean {key!r}{_elsewhere(owner, name, table)}?"
    every = {each: name for name, keys in tables.items() for each in keys}
    if len(key) > 3 and not nearest(key, known) and (close := nearest(key, list(every))):
        return f"Did you mean {close!r}{_elsewhere(owner, every[close], table)}?"
    hint = _near(key, known)
    if hint.startswith("Use"):
        hint += f" Settings of your script go after it (train.py --{key} ...), or into [params], "
        hint += f"which it reads as run.params.{key}."
    return hint


def _elsewhere(owner: str, name: str, table: str) -> str:
    return "" if name == table else f" in [{owner}{name}]"


def explain_flag(problem: ValidationError, flag: str) -> SpecError:
    """Return the same for a value from the command line."""
    error = problem.errors(include_url=False)[0]
    given = error["input"]
    typed = given[0] if isinstance(given, list) and len(given) == 1 else given
    value = REDACTED if flag.removeprefix("--notify-") in HIDDEN else show(typed)
    hint = ""
    if flag == "--profile":
        hint = "It chooses steps to profile. For a cluster, use --on or --cluster-profile."
    if flag.startswith("--gpus") and (match := re.fullmatch(r"(?:gpu:)?(\w+:)?(\d+)", str(given))):
        kind = f" --gpu-type {match[1][:-1]}" if match[1] else ""
        hint = f"Write --gpus {match[2]}{kind}."
    return SpecError(f"Invalid {flag} {value}: use {_expected(error)}.", hint=hint)
