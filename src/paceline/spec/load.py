"""Load a `Job` from `paceline.toml` and the command line: flags override the profile, which
overrides the file.
"""

from __future__ import annotations

import ast
import datetime
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.contract import env
from paceline.errors import SpecError
from paceline.spec.file_owner import is_trusted, owner_name
from paceline.spec.job import Job, Program, check_consistency
from paceline.spec.option import BIND, FOLDER, PROGRAM
from paceline.spec.sent_code import is_sent, laptop_path
from paceline.spec.settings import (
    ACCESS_KEYS,
    TABLE,
    Site,
    Tables,
    explain,
    explain_flag,
    nearest,
    show,
)
from paceline.spec.site import RECORDED, SITE_FILE, find_site, lower_to_limits
from paceline.spec.typed_flags import Flag, absolute_paths, from_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

log = logging.getLogger(__name__)

Layer = tuple[Mapping[str, Any], str]  # tables, and the file that they come from

FILE = "paceline.toml"
MAX_LITERAL = 1000  # characters of a value in Python's syntax
PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
NO_PROFILE = "none"  # as --cluster-profile: not even that of this cluster


@dataclass(frozen=True)
class ClusterProfile:
    """Use the profile with the name of this cluster, if no other is chosen. With `tables`, only
    these of it.

    `find_name` is called only if the file has such profiles: it asks Slurm.
    """

    find_name: Callable[[], str | None]
    tables: tuple[str, ...] | None = None

    def choose(self, profiles: Mapping[str, dict[str, Any]]) -> str | None:
        tables = [each.keys() for each in profiles.values()]
        if not any(self.tables is None or each & {*self.tables} for each in tables):
            return None
        cluster = profile_name(self.find_name() or "").lower()
        return next((name for name in profiles if cluster and name.lower() == cluster), None)


def profile_name(cluster: str) -> str:
    """Return the name of a cluster's profile: TOML takes it without quotes."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", cluster)


def load_job(
    program: Program,
    *,
    flags: Iterable[Flag] = (),
    params: Iterable[str] = (),
    config: Path | None = None,
    profile: str | None = None,
    cwd: Path | None = None,
    overlay: tuple[Mapping[str, Any], Path] | None = None,
    default_folder: Path | None = None,
    cluster: ClusterProfile | None = None,
) -> Job:
    """Read all layers, check each one, merge them, and check the result.

    Flags whose value is None were not typed. `params` are the `key=value` texts of `--param`.
    `overlay` is the tables of another file (a sweep's), which override those of paceline.toml.
    `default_folder` is the project's folder if there is neither a file nor a repository. `cluster`
    chooses a profile if neither `profile` nor the environment does.
    """
    _build_tables()
    cwd = cwd or Path.cwd()
    root = repository_root(cwd)
    file = config or find_file(cwd, root)
    site = find_site()
    layers: list[Layer] = [(site.values(), str(SITE_FILE))]
    chosen, used = profile or os.environ.get(env.PROFILE) or None, None
    if file is not None:
        values, name = read_file(file), str(laptop_path(file))
        profiles = _take_profiles(values, file)
        _validate(values, where=str(file))
        layers.append((values, name))
        used = chosen or (cluster.choose(profiles) if cluster is not None else None)
        if used is not None and used != NO_PROFILE:
            only = cluster.tables if cluster is not None and chosen is None else None
            tables = _profile(profiles, used, file)
            kept = {key: each for key, each in tables.items() if only is None or key in only}
            layers.append((kept, f"profile {used} of {name}"))
    elif profile not in (None, NO_PROFILE):
        raise SpecError(
            f"Invalid --cluster-profile {profile}: there is no {FILE}.",
            hint="Create one with `paceline init`, or name one with --config.",
        )
    if overlay is not None:
        _validate(overlay[0], where=str(overlay[1]))
        layers.append((overlay[0], str(laptop_path(overlay[1]))))
    folder = file.resolve().parent if file is not None else root or default_folder or cwd
    used = None if used == NO_PROFILE else used
    project = Job(program, Tables(), folder, cwd, file=file, profile=used, site=site)
    return _finish(project, layers, flags, params)


def _build_tables() -> None:
    """Have pydantic prepare the validation of all tables at once.

    It looks for no plugins: to find them, it would read the metadata of every installed package.
    """
    before = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = "__all__"
    try:
        Site.model_rebuild()
        Tables.model_rebuild()
    finally:
        del os.environ[PLUGINS]
        if before is not None:
            os.environ[PLUGINS] = before


def reload_job(
    project: Job, tables: Mapping[str, Any], *, flags: Iterable[Flag], params: Iterable[str]
) -> Job:
    """Return the job of an existing run: the `tables` that it recorded, overridden by what was
    typed this time.

    `project` has the program and the folders; its own tables are ignored, and no file is read.
    """
    _validate(tables, where=RECORDED)
    return _finish(replace(project, site=find_site()), [(tables, RECORDED)], flags, params)


def _finish(
    project: Job, layers: Iterable[Layer], flags: Iterable[Flag], params: Iterable[str]
) -> Job:
    """Merge the layers and what was typed, and check the result."""
    merged, sources = _merge(layers)
    _fix_paths(merged, project.folder)
    for flag in flags:
        _add_flag(flag, project.folder, merged, sources)
    _add_params(params, merged, sources)
    _drop_gpus(merged, sources)
    lower_to_limits(merged, sources, project.site)
    job = replace(project, tables=Tables.model_validate(merged), sources=sources)
    check_consistency(job)
    return job


def repository_root(cwd: Path) -> Path | None:
    """Return the nearest folder, here or above, that holds `.git`. Those of strangers are
    ignored.
    """
    for folder in (cwd, *cwd.parents):
        if is_sent(folder):
            return folder
        if (folder / ".git").exists() and _is_trusted(folder / ".git"):
            return folder
    return None


def find_file(cwd: Path, root: Path | None) -> Path | None:
    """Find the nearest `paceline.toml`, or `pyproject.toml` with `[tool.paceline]`, up to the
    repository's root.
    """
    for folder in (cwd, *cwd.parents):
        if (folder / FILE).is_file() and _is_trusted(folder / FILE):
            return folder / FILE
        project = folder / "pyproject.toml"
        try:
            is_ours = project.is_file() and "tool.paceline" in project.read_text(
                encoding="utf-8", errors="replace"
            )
        except OSError:  # whether it has our settings is known only to those who may read it
            is_ours = os.path.isfile(project)
        if is_ours and _is_trusted(project):
            return project
        if root is None or folder == root:
            return None
    return None


@functools.cache
def _is_trusted(path: Path) -> bool:
    """Return whether a file found here or above is this user's or root's; say once if it is not.

    Whoever can write to a folder above yours, such as /tmp, could otherwise set what your jobs
    execute.
    """
    if is_trusted(path):
        return True
    text = f"ignoring {str(path)!r}, which belongs to {owner_name(path)}"
    log.warning(text if path.name == ".git" else f"{text}; use it with --config")
    return False


def read_file(file: Path) -> dict[str, Any]:
    """Read a TOML file as plain values; of a pyproject.toml only `[tool.paceline]`."""
    try:
        # some editors write a mark first
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        reason = problem.strerror or problem
        raise SpecError(
            f"Cannot read {file}: {reason}.", hint="Check the path and its permissions."
        ) from None
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise SpecError(
            f"{file} is not UTF-8 text: see line {line}.", hint="Save it as UTF-8."
        ) from None
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(f"{file} is not valid TOML: {problem}.", hint="Fix that line.") from None
    if file.name == "pyproject.toml":
        values = values.get("tool", {}).get("paceline", {})
    return {key: _plain(value) for key, value in values.items()}


def parse_param(text: str) -> tuple[list[str], Any]:
    """Parse `model.width=64` into (["model", "width"], 64)."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise SpecError(
            f"Invalid --param {show(text)}: use key=value, e.g. lr=0.1 or model.width=64."
        )
    return path, parse_value(value)


def parse_value(text: str) -> Any:
    """Parse a value in TOML syntax (0.1, true, [1, 2], "text") or Python's (True, None, .1); else
    return the text.
    """
    try:
        # in brackets: a comment or a further line would be no value
        closed = tomllib.loads(f"value = [{text}]")["value"]
        value = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return _python_value(text)
    # A string with newlines may parse as further keys, and JSON has no dates.
    return closed[0] if len(value) == len(closed) == 1 and _plain(closed) == closed else text


def _python_value(text: str) -> Any:
    """Return True, False, None, a number or a list of such as Python spells them; anything else as
    a string.
    """
    try:
        value = ast.literal_eval(text) if len(text) <= MAX_LITERAL and "#" not in text else text
        is_plain = json.loads(json.dumps(value)) == value and not isinstance(value, dict)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if is_plain else text


def _plain(value: Any) -> Any:
    """Return dates and times as strings; everything else in TOML is plain data."""
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
    """Remove `[profiles.*]` from a file's values and validate each, including those not chosen."""
    profiles = values.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(
        isinstance(each, dict) for each in profiles.values()
    ):
        raise SpecError(
            f"Invalid profiles = {show(profiles)} in {file}: use tables.",
            hint="Write [profiles.NAME.job], [profiles.NAME.environment] and so on.",
        )
    for name, overrides in profiles.items():
        take_access(overrides, f"[profiles.{name}] of {file}")
        _validate(overrides, where=str(file), prefix=("profiles", name))
    return profiles


def take_access(profile: dict[str, Any], where: str) -> dict[str, str]:
    """Remove the keys for SSH from a profile and return them."""
    found = {key: profile.pop(key) for key in ACCESS_KEYS if key in profile}
    for key, value in found.items():
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise SpecError(f"Invalid {key} = {show(value)} in {where}: use a string.")
    return found


def _profile(profiles: Mapping[str, dict[str, Any]], name: str, file: Path) -> dict[str, Any]:
    if name not in profiles:
        close = nearest(name, list(profiles))
        known = ", ".join(sorted(profiles)) or "none"
        hint = f"Did you mean {close!r}?" if close else f"Its profiles: {known}."
        raise SpecError(f"There is no profile {name!r} in {file}.", hint=hint)
    return profiles[name]


def _merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers: later ones win key by key. `variables` and `params` are merged; lists are
    replaced.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for values, source in layers:
        _overlay(merged, values)
        for table, keys in values.items():
            sources |= {f"{table}.{key}": f"{table}.{key} in {source}" for key in keys}
    return merged, sources


def _fix_paths(merged: dict[str, Any], folder: Path) -> None:
    """Make a file's paths absolute where a job uses them as they are: it starts in another
    folder.
    """
    for option in (option for group in TABLE.values() for option in group):
        table, _, key = option.key.partition(".")
        if option.path in (PROGRAM, BIND, FOLDER) and merged.get(table, {}).get(key):
            merged[table][key] = absolute_paths(merged[table][key], option.path, str(folder))


def _overlay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict):
            if not isinstance(under.get(key), dict):
                under[key] = {}
            _overlay(under[key], value)
        else:
            under[key] = value


def validate_flag(flag: Flag) -> Any:
    """Return the validated value of a flag."""
    table, key = flag.key.split(".", 1)
    try:
        return getattr(getattr(Tables.model_validate({table: {key: flag.value}}), table), key)
    except ValidationError as problem:
        raise explain_flag(problem, flag.name) from None


def _add_flag(flag: Flag, folder: Path, merged: dict[str, Any], sources: dict[str, str]) -> None:
    if flag.value is None:
        return
    validate_flag(flag)
    table, key = flag.key.split(".", 1)
    _overlay(merged, {table: {key: from_folder(flag, str(folder))}})
    sources[flag.key] = flag.name


def _drop_gpus(merged: dict[str, Any], sources: dict[str, str]) -> None:
    """If `--cpu` was typed, don't ask for the GPUs that a file asks for."""
    if sources.get("runtime.cpu") != "--cpu" or not merged["runtime"]["cpu"]:
        return
    for key in ("gpus_per_node", "gpu_type"):
        if key in merged.get("job", {}) and not sources[f"job.{key}"].startswith("--"):
            del merged["job"][key], sources[f"job.{key}"]


def _add_params(params: Iterable[str], merged: dict[str, Any], sources: dict[str, str]) -> None:
    for text in params:
        path, value = parse_param(text)
        table = merged.setdefault("params", {})
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise SpecError(
                    f"Invalid --param {'.'.join(path)}: {key} is {show(table)}, not a table.",
                    hint="Rename one of the two.",
                )
        table[path[-1]] = value
        sources[f"params.{'.'.join(path)}"] = "--param"
