"""Validation errors, said so that the reader can mend the file: where, what was found, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paceline.errors import SpecError
from paceline.spec.tables import Tables

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a text in quotes, such as "this"',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return close[0] if close else None


def show(value: object) -> str:
    """A value as TOML would write it, cut short; of a table its keys alone, since there may be secrets in it."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = f"a table of {', '.join(map(str, value))}" if value else "an empty table"
    elif isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"one of {context['expected']}".replace("'", '"')
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    return _EXPECTED.get(kind, str(error["msg"]))


def _table(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The model that a path of keys leads to."""
    model = root
    for key in path:
        kind = model.model_fields[key].annotation if key in model.model_fields else None
        if get_origin(kind) is not None:
            kind = next((each for each in get_args(kind) if isinstance(each, type)), None)
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model


def _homes(key: str) -> list[str]:
    """The tables that know a key: it is often right, and in the wrong table."""
    found = []
    for name, each in Tables.model_fields.items():
        kind = each.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            found.append(name)
    return found


def _unknown(where: str, path: Sequence[str], known: Sequence[str]) -> SpecError:
    key = path[-1]
    inside = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the file"
    close, homes = nearest(key, known), _homes(key)
    if homes:
        hint = f"{key} belongs in [{homes[0]}]"
    elif close:
        hint = f"the nearest known key is {close!r}"
    else:
        hint = f"{inside} knows: {', '.join(known)}"
    return SpecError(f"{where}: {inside} has no key {key!r}", hint=hint)


def explain(
    problem: ValidationError, *, where: str, prefix: Sequence[str] = (), root: type[BaseModel] = Tables
) -> SpecError:
    """The first thing wrong with a layer, as one error. `prefix` is where in the file the layer stands."""
    error = problem.errors(include_url=False)[0]
    path = [str(key) for key in error["loc"]]
    while path and (_table(path[:-1], root) is None):  # inside a value: name the key that holds it
        path.pop()
    if error["type"] == "extra_forbidden":
        model = _table(path[:-1], root) or root
        known = sorted(model.model_fields) + (["profiles"] if model is Tables and not prefix else [])
        return _unknown(where, [*prefix, *path], known)
    full = [*prefix, *path]
    name = f"[{'.'.join(full[:-1])}] {full[-1]}" if len(full) > 1 else f"[{full[0]}]"
    return SpecError(
        f"{where}: {name}: found {show(error['input'])}, expected {_expected(error)}",
        hint=f"change {full[-1]} in {where}",
    )


def explain_flag(problem: ValidationError, flag: str) -> SpecError:
    """The same for a value that came by the command line."""
    error = problem.errors(include_url=False)[0]
    return SpecError(
        f"{flag}: found {show(error['input'])}, expected {_expected(error)}",
        hint=f"give {flag} another value",
    )
