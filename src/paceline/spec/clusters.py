"""The clusters that `--on` can name: profiles with a host in paceline.toml, and the user's own
clusters.toml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, SpecError, UsageError
from paceline.spec.load import find_file, profile_name, read_file, repository_root, take_access
from paceline.spec.settings import ACCESS_KEYS, Tables, nearest, show
from paceline.spec.shell_text import cluster as shown_cluster
from paceline.spec.shell_text import quote

_EXAMPLE = "login.example.org"
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\]-]*")


@dataclass(frozen=True)
class Cluster:
    """A cluster behind a login node."""

    name: str
    host: str
    python: str | None = None  # the interpreter to use there
    setup: str | None = None  # shell commands that come first there, such as `module load python`
    has_profile: bool = False  # whether paceline.toml has settings for it


@dataclass(frozen=True)
class ProjectFile:
    """The nearest paceline.toml, as far as clusters are concerned."""

    file: Path | None
    values: Mapping[str, Any]

    @classmethod
    def find(cls, cwd: Path, config: Path | None = None) -> ProjectFile:
        file = config or find_file(cwd, repository_root(cwd))
        return cls(file, read_file(file) if file is not None else {})

    @property
    def default(self) -> str | None:
        """The cluster that `on` in [project] names."""
        project = self.values.get("project")
        value = project.get("on") if isinstance(project, dict) else None
        return value if isinstance(value, str) else None

    def without_host(self) -> list[str]:
        """Return the tables of the user's clusters.toml that have no login node, not even in
        paceline.toml.
        """
        return sorted(set(_own_tables()) - set(self.clusters()))

    def clusters(self) -> dict[str, Cluster]:
        """Return all clusters by name. What paceline.toml says about one overrides the user's
        clusters.toml.
        """
        own_file, own = user_file(), _own_tables()
        profiles = _tables(self.values.get("profiles", {}), self.file)
        found = {}
        for name in (*own, *(each for each in profiles if each not in own)):
            access = take_access(own.get(name, {}), f"[{name}] of {own_file}")
            access |= take_access(profiles.get(name, {}), f"[profiles.{name}] of {self.file}")
            if "host" in access:
                _check_host(
                    access["host"],
                    f"[profiles.{name}] of {self.file}" if name in profiles else str(own_file),
                )
                found[name] = Cluster(name, **access, has_profile=name in profiles)
        return found


def user_file() -> Path:
    """Return the path of the file that names the user's clusters for all projects."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(config) / "paceline" / "clusters.toml"


def find_cluster(name: str, project: ProjectFile) -> Cluster:
    known = project.clusters()
    if name in known:
        return known[name]
    _check_has_host(name, project)
    if close := nearest(name, list(known)):
        raise UsageError(f"There is no cluster {name!r}.", hint=f"Did you mean {close!r}?")
    others = f" You have {', '.join(sorted(known))}." if known else ""
    raise UsageError(f"There is no cluster {name!r}.{others}", hint=explain_table(project, name))


def explain_table(project: ProjectFile, name: str = "") -> str:
    """Return what to write into paceline.toml for a cluster. `name` is what somebody typed."""
    is_host = bool(_HOST.fullmatch(name)) and any(mark in name for mark in "@.:")
    key = "alps" if is_host or not name else profile_name(name)
    host = name if is_host else _EXAMPLE
    table = (
        "tool.paceline.profiles"
        if project.file and project.file.name == "pyproject.toml"
        else "profiles"
    )
    use = f" Then type `paceline login {key}`." if is_host else ""
    whose = "its" if name else "a cluster's"
    return (
        f"Write {whose} login node into {project.file or 'paceline.toml of your project'}:"
        f'\n    [{table}.{key}]\n    host = "{host}"'
        f"\n  For all projects, write it into {user_file()}, below [{key}].{use}"
    )


def suggest_clusters(what: str = "runs") -> str:
    """Return how to name what is on a cluster, for somebody who looks for it here; empty if no
    cluster is known.
    """
    if shown_cluster():
        return ""
    try:
        names = sorted(ProjectFile.find(Path.cwd()).clusters())
    except (PacelineError, OSError):  # it is no part of the error that this is a hint of
        return ""
    if not names:
        return ""
    if len(names) == 1:
        return f"For {what} on {names[0]}, add `--on {quote(names[0])}`."
    return (
        f"For {what} on a cluster, add `--on` and its name: {', '.join(names[:-1])} or {names[-1]}."
    )


def _check_has_host(name: str, project: ProjectFile) -> None:
    """Raise an error if there are settings for a cluster, but no login node."""
    profiles = _tables(project.values.get("profiles", {}), project.file)
    for table, where in (
        (profiles.get(name), f"[profiles.{name}] of {project.file}"),
        (_own_tables().get(name), f"[{name}] of {user_file()}"),
    ):
        if table is None:
            continue
        for key in (key for key in table if key not in (*ACCESS_KEYS, *Tables.model_fields)):
            if nearest(key, ACCESS_KEYS) == "host":
                raise SpecError(f"Unknown key {key!r} in {where}.", hint="Did you mean 'host'?")
        raise UsageError(
            f"{where} has no host.", hint=f'Add its login node there, such as host = "{_EXAMPLE}".'
        )


def _own_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of the user's own file. It has nothing but how to reach clusters."""
    file = user_file()
    tables = _tables(read_file(file) if file.is_file() else {}, file)
    for name, table in tables.items():
        for key in (key for key in table if key not in ACCESS_KEYS):
            close = nearest(key, ACCESS_KEYS) if not isinstance(table[key], dict) else None
            hint = (
                f"Did you mean {close!r}?"
                if close
                else f"It has host, python and setup. Settings of jobs go into [profiles.{name}] "
                "of paceline.toml."
            )
            raise SpecError(f"Unknown key {key!r} in [{name}] of {file}.", hint=hint)
    return tables


def _tables(values: Any, file: Path | None) -> dict[str, dict[str, Any]]:
    """Return copies of the tables of a file."""
    if not isinstance(values, dict) or not all(isinstance(each, dict) for each in values.values()):
        hint = 'Write a table for each cluster, with host = "login.example.org".'
        raise SpecError(f"Invalid {show(values)} in {file}: use tables.", hint=hint)
    return {name: dict(table) for name, table in values.items()}


def _check_host(host: str, where: str) -> None:
    """Reject what is no host name: ssh would take a leading dash as an option."""
    if not _HOST.fullmatch(host):
        raise SpecError(
            f"Invalid host = {show(host)} in {where}.",
            hint='Use a name of ~/.ssh/config, or user@host, e.g. host = "login.example.org".',
        )
