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

from paceline.errors import UsageError
from paceline.spec.load import find_file, profile_name, repository_root
from paceline.spec.settings import PROJECT_FILE, Access, File, check, nearest, read_file
from paceline.spec.values import HOST

_EXAMPLE = "login.example.org"


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
        return check(self.values, self.file, File).project.on

    def clusters(self) -> dict[str, Cluster]:
        """Return all clusters by name. What paceline.toml says about one overrides the user's
        clusters.toml.
        """
        profiles = check(self.values, self.file, File).profiles
        known: dict[str, dict[str, Any]] = {}
        for tables in (_own_tables(), profiles):
            for name, table in tables.items():
                access = table.model_dump(include=set(Access.model_fields), exclude_none=True)
                known.setdefault(name, {}).update(access)
        return {
            name: Cluster(name, **access, has_profile=name in profiles)
            for name, access in known.items()
            if "host" in access
        }


def user_file() -> Path:
    """Return the path of the file that names the user's clusters for all projects."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(config) / "paceline" / "clusters.toml"


def find_cluster(name: str, project: ProjectFile) -> Cluster:
    known = project.clusters()
    if name in known:
        return known[name]
    own = f"[{name}] of {user_file()}" if name in _own_tables() else ""
    if own or name in project.values.get("profiles", {}):
        raise UsageError(
            f"{own or f'[profiles.{name}] of {project.file}'} has no host.",
            hint=f'Add its login node there, such as host = "{_EXAMPLE}".',
        )
    if close := nearest(name, list(known)):
        raise UsageError(f"There is no cluster {name!r}.", hint=f"Did you mean {close!r}?")
    others = f" You have {', '.join(sorted(known))}." if known else ""
    raise UsageError(f"There is no cluster {name!r}.{others}", hint=explain_table(project, name))


def explain_table(project: ProjectFile, name: str = "") -> str:
    """Return what to write into paceline.toml for a cluster. `name` is what somebody typed."""
    is_host = bool(re.fullmatch(HOST, name)) and any(mark in name for mark in "@.:")
    key = "alps" if is_host or not name else profile_name(name)
    tool = "tool.paceline." if project.file and project.file.name == PROJECT_FILE else ""
    whose = "its" if name else "a cluster's"
    use = f" Then type `paceline login {key}`." if is_host else ""
    return (
        f"Write {whose} login node into {project.file or 'paceline.toml of your project'}:"
        f'\n    [{tool}profiles.{key}]\n    host = "{name if is_host else _EXAMPLE}"'
        f"\n  For all projects, write it into {user_file()}, below [{key}].{use}"
    )


def _own_tables() -> dict[str, Access]:
    """Return the tables of the user's own file. It has nothing but how to reach clusters."""
    file = user_file()
    tables = read_file(file) if file.is_file() else {}
    return {name: check(each, f"[{name}] of {file}", Access) for name, each in tables.items()}
