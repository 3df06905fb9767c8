"""From `paceline.toml` and the command line to a `Job`: file < profile < flags."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.spec.job import Job, Program, check_agreement
from paceline.spec.tables import Tables
from paceline.spec.validation_errors import explain, explain_flag, nearest, show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FILE = "paceline.toml"
PROFILE = (
    "PACELINE_PROFILE"  # which [profiles.NAME] to use, where no flag says it: one line in a shell's rc file
)


@dataclass(frozen=True)
class Flag:
    """A value from the command line: the flag as typed, the key that it sets ("job.nodes"), the value."""

    name: str
    key: str
    value: Any


@dataclass(frozen=True)
class _Layer:
    values: dict[str, Any]
    source: str


def load_job(
    program: Program,
    *,
    flags: Iterable[Flag] = (),
    params: Iterable[str] = (),
    config: Path | None = None,
    profile: str | None = None,
    cwd: Path | None = None,
    over: tuple[Mapping[str, Any], Path] | None = None,
    around: Path | None = None,
) -> Job:
    """Read all layers, check each by itself, merge them, check what they say together.

    `flags` whose value is None were not typed. `params` are the `key=value` texts of `--param`. `over` are tables
    of another file (a sweep's) that lie over those of paceline.toml. `around` is a folder above `cwd` that is the
    project where neither a file nor a repository says so.
    """
    cwd = cwd or Path.cwd()
    root = repository_root(cwd)
    file = config or find_file(cwd, root)
    layers: list[_Layer] = []
    chosen = profile or os.environ.get(PROFILE) or None
    if file is not None:
        values = read_file(file)
        profiles = _take_profiles(values, file)
        _validate(values, where=str(file))
        layers.append(_Layer(values, str(file)))
        layers += _profile_layer(profiles, chosen, file)
    elif profile is not None:
        raise SpecError(
            f"--cluster-profile {profile}: there is no {FILE} to look in",
            hint="write one with `paceline init`, or name one with --config",
        )
    if over is not None:
        _validate(over[0], where=str(over[1]))
        layers.append(_Layer(dict(over[0]), str(over[1])))
    merged, sources = _merge(layers)
    _add_flags(flags, merged, sources)
    _add_params(params, merged, sources)
    job = Job(
        program=program,
        tables=Tables.model_validate(merged),
        folder=(file.resolve().parent if file is not None else root or around or cwd),
        cwd=cwd,
        file=file,
        profile=chosen if file is not None else None,
        sources=sources,
    )
    check_agreement(job)
    return job


def repository_root(cwd: Path) -> Path | None:
    """The folder that holds `.git`, here or above."""
    for folder in (cwd, *cwd.parents):
        if (folder / ".git").exists():
            return folder
    return None


def find_file(cwd: Path, root: Path | None) -> Path | None:
    """The nearest `paceline.toml`, or `pyproject.toml` with `[tool.paceline]`, up to the repository's root."""
    for folder in (cwd, *cwd.parents):
        if (folder / FILE).is_file():
            return folder / FILE
        project = folder / "pyproject.toml"
        if project.is_file() and "tool.paceline" in project.read_text(encoding="utf-8", errors="replace"):
            return project
        if root is None or folder == root:
            return None
    return None


def read_file(file: Path) -> dict[str, Any]:
    """What a file says, as plain values; `[tool.paceline]` of a pyproject."""
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f"{file}: there is no such file", hint="check --config, or leave it out to search for one"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(
            f"{file}: cannot be read: {problem}", hint="check the path and its permissions"
        ) from None
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(f"{file}: is not TOML: {problem}", hint="mend the line that it names") from None
    if file.name == "pyproject.toml":
        values = values.get("tool", {}).get("paceline", {})
    return {key: _plain(value) for key, value in values.items()}


def parse_param(text: str) -> tuple[list[str], Any]:
    """`model.width=64` -> (["model", "width"], 64). Values in TOML's syntax; anything else is a text."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise SpecError(
            f"--param: found {show(text)}, expected key=value",
            hint="such as --param lr=0.1 or --param model.width=64",
        )
    return path, parse_value(value)


def parse_value(text: str) -> Any:
    """A value in TOML's syntax (0.1, true, [1, 2], "text"); what is none is a text as it stands."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    # A text with newlines might have been read as further keys, and a date has no place in JSON.
    return value if len(parsed) == 1 and _plain(value) == value else text


def _plain(value: Any) -> Any:
    """Dates and times as texts: all else in TOML is plain data."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else value


def _validate(values: Mapping[str, Any], *, where: str, prefix: tuple[str, ...] = ()) -> None:
    try:
        Tables.model_validate(values)
    except ValidationError as problem:
        raise explain(problem, where=where, prefix=prefix) from None


def _take_profiles(values: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    """Take `[profiles.*]` out of a file's values; each must be right by itself, also those not chosen."""
    profiles = values.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(each, dict) for each in profiles.values()):
        raise SpecError(
            f"{file}: [profiles]: found {show(profiles)}, expected tables",
            hint="write [profiles.NAME.job], [profiles.NAME.environment] and so on",
        )
    for name, overrides in profiles.items():
        _validate(overrides, where=str(file), prefix=("profiles", name))
    return profiles


def _profile_layer(profiles: Mapping[str, dict[str, Any]], chosen: str | None, file: Path) -> list[_Layer]:
    if chosen is None:
        return []
    if chosen not in profiles:
        close = nearest(chosen, list(profiles))
        known = (
            f"the profiles are: {', '.join(sorted(profiles))}" if profiles else "it has no [profiles.NAME]"
        )
        raise SpecError(
            f"{file}: there is no profile {chosen!r}", hint=f"did you mean {close!r}?" if close else known
        )
    return [_Layer(profiles[chosen], f"profile {chosen} of {file}")]


def _merge(layers: Iterable[_Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Later layers win key by key; `variables` and `params` are merged, lists are replaced."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _overlay(merged, layer.values)
        for table, keys in layer.values.items():
            for key in keys:
                sources[f"{table}.{key}"] = f"{table}.{key} in {layer.source}"
    return merged, sources


def _overlay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _overlay(under[key], value)
        else:
            under[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def _add_flags(flags: Iterable[Flag], merged: dict[str, Any], sources: dict[str, str]) -> None:
    for flag in flags:
        if flag.value is None:
            continue
        table, key = flag.key.split(".", 1)
        values = {table: {key: flag.value}}
        try:
            Tables.model_validate(values)
        except ValidationError as problem:
            raise explain_flag(problem, flag.name) from None
        _overlay(merged, values)
        sources[flag.key] = flag.name


def _add_params(params: Iterable[str], merged: dict[str, Any], sources: dict[str, str]) -> None:
    for text in params:
        path, value = parse_param(text)
        table = merged.setdefault("params", {})
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise SpecError(
                    f"--param: {'.'.join(path)} needs {key} to be a table, found {show(table)}",
                    hint="give the two another name",
                )
        table[path[-1]] = value
        sources[f"params.{'.'.join(path)}"] = "--param"
