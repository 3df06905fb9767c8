"""Validation errors as messages: which key or flag is wrong, its value, and what to use instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paceline.contract.redaction import REDACTED
from paceline.errors import SpecError
from paceline.spec.synonyms import find_key, is_of_script
from paceline.spec.types_and_defaults import ACCESS_KEYS, Tables

OF_SCRIPT = (
    "It looks like a setting of your script: pass it after the script (train.py --{key} ...), or "
    "set it in [params],"
    " which the script reads as run.params.{key}. A sweep varies it in [space]."
)

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string, e.g. "text"',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
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
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"one of {context['expected']}".replace(" or ", ", ").replace("'", "")
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    return _EXPECTED.get(kind, str(error["msg"]))


def _table(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model that a path of keys leads to."""
    model = root
    for key in path:
        kind = model.model_fields[key].annotation if key in model.model_fields else None
        if get_origin(kind) is not None:
            kind = next((each for each in get_args(kind) if isinstance(each, type)), None)
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model


def _tables_with(key: str) -> list[str]:
    """Return the tables that have a key: a key is often right, but in the wrong table."""
    found = []
    for name in Tables.model_fields:
        model = _model(name)
        if model is not None and key in model.model_fields:
            found.append(name)
    return found


def _model(table: str) -> type[BaseModel] | None:
    kind = Tables.model_fields[table].annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown(where: str, path: Sequence[str], known: Sequence[str]) -> SpecError:
    key = path[-1]
    table = f"[{'.'.join(path[:-1])}] of {where}" if path[:-1] else where
    is_profile = len(path) == 3 and path[0] == "profiles"
    owner = f"{'.'.join(path[:2])}." if path[0] == "profiles" and len(path) > 2 else ""
    hint, page = _suggest(
        key, "profiles" if is_profile else path[-2] if path[:-1] else "", known, owner
    )
    return SpecError(f"Unknown key {key!r} in {table}.", hint=f"{hint} {reference(page)}")


def _suggest(key: str, table: str, known: Sequence[str], owner: str = "") -> tuple[str, str]:
    """Return what to use instead of an unknown key, of its own table or of the one it belongs in,
    and that table.

    `owner` comes before the names of tables: `profiles.alps.`
    """
    if right := _tables_with(key):
        return f"Move it to [{owner}{right[0]}].", right[0]
    found = find_key(key)
    meant = (found.partition(".")[0], found.partition(".")[2]) if found else None
    close = nearest(key, known)
    if meant is None and is_of_script(key):
        return OF_SCRIPT.format(key=key), "params"
    if meant is None and close is None:
        every = {
            name: each
            for each in Tables.model_fields
            for name in sorted(getattr(_model(each), "model_fields", ()))
        }
        close = nearest(key, list(every))
        meant = (every[close], close) if close else None
    if meant is not None:
        where = "" if meant[0] == table else f" in [{owner}{meant[0]}]"
        return f"Did you mean {meant[1]!r}{where}?", meant[0]
    return (f"Did you mean {close!r}?" if close else f"Use one of {', '.join(known)}."), table


def reference(table: str) -> str:
    """Return what to type to read about the keys of a table, or about all tables."""
    return f"See `paceline reference {'sweep.toml' if table == 'sweep' else table}".rstrip() + "`."


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
    if error["type"] == "extra_forbidden":
        model = _table(path[:-1], root) or root
        more = ["profiles"] if not prefix else ACCESS_KEYS if prefix[0] == "profiles" else []
        known = sorted(model.model_fields) + ([*more] if model is Tables else [])
        return _unknown(where, [*prefix, *path], known)
    full = [*prefix, *path]
    table = f"[{'.'.join(full[:-1])}] of {where}" if len(full) > 1 else where
    value = REDACTED if "notify" in full and full[-1] in HIDDEN else show(error["input"])
    return SpecError(f"Invalid {full[-1]} = {value} in {table}: use {_expected(error)}.")


def explain_flag(problem: ValidationError, flag: str) -> SpecError:
    """Return the same for a value from the command line."""
    error = problem.errors(include_url=False)[0]
    given = error["input"]
    typed = given[0] if isinstance(given, list) and len(given) == 1 else given
    value = REDACTED if flag.removeprefix("--notify-") in HIDDEN else show(typed)
    name, hint = str(error["input"]), ""
    if flag == "--profile" and re.fullmatch(r"[A-Za-z][\w.-]*", name):
        hint = (
            f"--profile chooses steps to profile. To work on a cluster over SSH: --on {name}. "
            f"For the settings in [profiles.{name}]: --cluster-profile {name}."
        )
    if flag.startswith("--gpus") and (
        match := re.fullmatch(r"(?:gpu:)?([A-Za-z][\w.-]*):(\d+)", name)
    ):
        kind, count = match.groups()
        hint = (
            f"Write --gpus {count}."
            if kind == "gpu"
            else f"For a type, write --gpus {count} --gpu-type {kind}."
        )
    return SpecError(f"Invalid {flag} {value}: use {_expected(error)}.", hint=hint)
