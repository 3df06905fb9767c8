"""Load a `Job` from `paceline.toml` and the command line: flags override the profile, which
overrides the file.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.contract import env
from paceline.errors import SpecError
from paceline.spec.job import Job, Program, check_consistency
from paceline.spec.option import BIND, FOLDER, PROGRAM, Flag, absolute_paths
from paceline.spec.settings import (
    FILE,
    PROJECT_FILE,
    SITE_FILE,
    TABLE,
    File,
    Site,
    Tables,
    check,
    explain_flag,
    find_site,
    nearest,
    parse_param,
    prepare,
    read_file,
    show,
)
from paceline.spec.user_files import is_trusted, owner_name

log = logging.getLogger(__name__)

Layer = tuple[Mapping[str, Any], str]  # tables, and the file that they come from

# what a run had when it was submitted, perhaps before there was a limit
RECORDED = "the run's settings"
SENT_FILE = ".paceline-code.json"
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
    prepare(Site, Tables)
    cwd = cwd or Path.cwd()
    root = repository_root(cwd)
    file = config or find_file(cwd, root)
    site = find_site()
    layers: list[Layer] = [(site.values(), str(SITE_FILE))]
    chosen, used = profile or os.environ.get(env.PROFILE) or None, None
    if file is not None:
        values, name = read_file(file), str(laptop_path(file))
        check(values, file, File)
        profiles = values.pop("profiles", {})
        layers.append((values, name))
        used = chosen or (cluster.choose(profiles) if cluster is not None else None)
        used = None if used == NO_PROFILE else used
        if used is not None:
            only = cluster.tables if cluster is not None and chosen is None else None
            tables = _profile(profiles, used, file)
            kept = {key: tables[key] for key in only or Tables.model_fields if key in tables}
            layers.append((kept, f"profile {used} of {name}"))
    elif profile not in (None, NO_PROFILE):
        raise SpecError(
            f"Invalid --cluster-profile {profile}: there is no {FILE}.",
            hint="Create one with `paceline init`, or name one with --config.",
        )
    if overlay is not None:
        check(overlay[0], overlay[1], Tables)
        layers.append((overlay[0], str(laptop_path(overlay[1]))))
    folder = file.resolve().parent if file is not None else root or default_folder or cwd
    project = Job(program, Tables(), folder, cwd, file=file, profile=used, site=site)
    return _finish(project, layers, flags, params)


def reload_job(
    project: Job, tables: Mapping[str, Any], *, flags: Iterable[Flag], params: Iterable[str]
) -> Job:
    """Return the job of an existing run: the `tables` that it recorded, overridden by what was
    typed this time.

    `project` has the program and the folders; its own tables are ignored, and no file is read.
    """
    check(tables, RECORDED, Tables)
    return _finish(replace(project, site=find_site()), [(tables, RECORDED)], flags, params)


def _finish(
    project: Job, layers: Iterable[Layer], flags: Iterable[Flag], params: Iterable[str]
) -> Job:
    """Merge the layers and what was typed, and check the result. Later layers win key by key.
    `variables` and `params` are merged; lists are replaced.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for values, source in layers:
        _overlay(merged, values)
        keys = [f"{table}.{key}" for table, found in values.items() for key in found]
        sources |= {key: f"{key} in {source}" for key in keys}
    _fix_paths(merged, project.folder)
    for flag in flags:
        _add_flag(flag, merged, sources)
    _add_params(params, merged, sources)
    _drop_gpus(merged, sources)
    _lower_to_limits(merged, sources, project.site)
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
        for file in (folder / FILE, folder / PROJECT_FILE):
            if file.is_file() and _has_settings(file) and _is_trusted(file):
                return file
        if root is None or folder == root:
            return None
    return None


def _has_settings(file: Path) -> bool:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        return file.name == FILE or "tool.paceline" in text
    except OSError:  # whether it has our settings is known only to those who may read it
        return True


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


def _profile(profiles: Mapping[str, dict[str, Any]], name: str, file: Path) -> dict[str, Any]:
    if name not in profiles:
        close = nearest(name, list(profiles))
        known = ", ".join(sorted(profiles)) or "none"
        hint = f"Did you mean {close!r}?" if close else f"Its profiles: {known}."
        raise SpecError(f"There is no profile {name!r} in {file}.", hint=hint)
    return profiles[name]


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


def _add_flag(flag: Flag, merged: dict[str, Any], sources: dict[str, str]) -> None:
    if flag.value is None:
        return
    validate_flag(flag)
    table, key = flag.key.split(".", 1)
    value = absolute_paths(flag.value, flag.path, os.getcwd()) if flag.path else flag.value
    _overlay(merged, {table: {key: value}})
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


# The keys of paceline.toml that limits are for.
_LIMITED = {"requeues_per_day": "resume.requeues_per_day", "keep_data": "data.keep"}


def _lower_to_limits(values: dict[str, Any], sources: Mapping[str, str], site: Site) -> None:
    """Lower what nobody has chosen to the site's limits; raise an error for what a file or a flag
    exceeds.
    """
    limits = site.model_dump(exclude_none=True)["limits"]
    for name in limits.keys() & _LIMITED.keys():
        table, _, key = _LIMITED[name].partition(".")
        value = getattr(getattr(Tables.model_validate(values), table), key)  # or its default
        if value is None or value <= limits[name]:
            continue
        source = sources.get(_LIMITED[name], "")
        if source and not source.endswith(RECORDED):
            limit = site.model_dump(mode="json")["limits"][name]
            raise SpecError(
                f"{source} exceeds what this site allows: at most {limit}.",
                hint=f"The limit is {name} in [limits] of {SITE_FILE}.",
            )
        values.setdefault(table, {})[key] = limits[name]


# -- a project that was sent here from another machine
#
# Its folder has no repository. Next to it lies a file that says what git said on the other machine.


def is_sent(folder: Path) -> bool:
    """Return whether a folder is a project that was sent here. Only commands that came the same
    way ask.
    """
    return bool(os.environ.get(env.ON_CLUSTER)) and (folder.parent / SENT_FILE).is_file()


def laptop_path(path: Path) -> Path:
    """Return a path of a project that was sent here as it is where the command was typed; any
    other path unchanged.
    """
    sent, typed = os.environ.get(env.SENT_FOLDER), os.environ.get(env.LAPTOP_FOLDER)
    return (
        Path(typed) / path.relative_to(sent)
        if sent and typed and path.is_relative_to(sent)
        else path
    )
