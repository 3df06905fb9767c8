"""`/etc/paceline/site.toml`: a site's defaults for jobs, and limits that its users cannot
exceed.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.spec.quantities import parse_mebibytes, parse_seconds, show_seconds, slurm_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

log = logging.getLogger(__name__)

SITE_FILE = Path("/etc/paceline/site.toml")
# what a run had when it was submitted, perhaps before there was a limit
RECORDED = "the run's settings"
_OURS = "Your administrators maintain this file."


@dataclass(frozen=True)
class Defaults:
    """For jobs that do not say otherwise."""

    partition: str | None = None
    account: str | None = None


@dataclass(frozen=True)
class Limits:
    """What no file and no flag of a user can exceed."""

    requeues_per_day: int | None = None
    keep_data: int | None = None  # seconds
    stage_size: int | None = None  # mebibytes per node
    poll_interval: int | None = None  # seconds, at least


@dataclass(frozen=True)
class Site:
    """What a site sets; nothing if it has no file."""

    defaults: Defaults = field(default_factory=Defaults)
    limits: Limits = field(default_factory=Limits)

    def describe(self) -> str:
        """Return what the site sets in one line; empty if it sets nothing."""
        limits = self.limits
        parts = [
            f"default {key} {value}"
            for key, value in asdict(self.defaults).items()
            if value is not None
        ]
        parts += (
            [f"at most {limits.requeues_per_day} requeues a day"] if limits.requeues_per_day else []
        )
        parts += (
            [f"staged data kept for {show_seconds(limits.keep_data)}"]
            if limits.keep_data is not None
            else []
        )
        parts += (
            [f"at most {slurm_size(limits.stage_size)} staged per node"]
            if limits.stage_size
            else []
        )
        parts += (
            [f"Slurm asked every {show_seconds(limits.poll_interval)}"]
            if limits.poll_interval
            else []
        )
        return ", ".join(parts)


def find_site() -> Site:
    """Return what this machine's site sets."""
    return read_site(SITE_FILE)


@functools.cache
def read_site(path: Path) -> Site:
    """Read a site's file. One that anybody but root can change is ignored, with a note."""
    problem = _distrust(path)
    if problem is None:
        return Site()
    if problem:
        log.warning("ignoring %s: %s", path, problem)
        return Site()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"Cannot read {path}: {error}.", hint=_OURS) from None
    for name in tables:
        if name not in _KEYS:
            raise _unknown(name, list(_KEYS), str(path))
    return Site(
        Defaults(**_parse(tables, "defaults", path)), Limits(**_parse(tables, "limits", path))
    )


def _distrust(path: Path) -> str | None:
    """Return why a file does not count; empty if it does, None if there is none."""
    for each in (path, path.parent):
        try:
            status = os.stat(each)
        except OSError:
            return None
        if status.st_uid != 0:
            return f"{each} does not belong to root"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"users other than root can write to {each}"
    return ""


def _line(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError('a name, e.g. "gpu"')
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number from 1")
    return value


_KEYS: dict[str, dict[str, Callable[[object], Any]]] = {
    "defaults": {"partition": _line, "account": _line},
    "limits": {
        "requeues_per_day": _count,
        "keep_data": parse_seconds,
        "stage_size": parse_mebibytes,
        "poll_interval": parse_seconds,
    },
}


def _parse(tables: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Return the values of a table. Raises SpecError for a key or a value that is wrong."""
    table, parsers, found = tables.get(name, {}), _KEYS[name], {}
    if not isinstance(table, dict):
        raise SpecError(f"Invalid {name} = {table!r} in {path}: use a table.", hint=_OURS)
    for key, value in table.items():
        if key not in parsers:
            raise _unknown(key, list(parsers), f"[{name}] of {path}")
        try:
            found[key] = parsers[key](value)
        except ValueError as error:
            raise SpecError(
                f"Invalid {key} = {value!r} in [{name}] of {path}: use {error}.", hint=_OURS
            ) from None
    return found


def _unknown(key: str, known: list[str], where: str) -> SpecError:
    from difflib import get_close_matches

    close = get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(known)}."
    return SpecError(f"Unknown key {key!r} in {where}.", hint=f"{hint} {_OURS}")


# -- limits of users' settings
# ------------------------------------------------------------------------------

# The key of paceline.toml that a limit is for, and how its values are shown.
_LIMITED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "resume.requeues_per_day": ("requeues_per_day", str),
    "data.keep": ("keep_data", show_seconds),
}


def site_values(site: Site) -> dict[str, Any]:
    """Return the site's defaults as tables of paceline.toml."""
    values = {key: value for key, value in asdict(site.defaults).items() if value is not None}
    return {"job": values} if values else {}


def lower_to_limits(values: dict[str, Any], sources: Mapping[str, str], site: Site) -> None:
    """Lower what nobody has chosen to the site's limits; raise an error for what a file or a flag
    exceeds.
    """
    from paceline.spec.types_and_defaults import Tables

    for name, (limit_name, describe) in _LIMITED.items():
        limit = getattr(site.limits, limit_name)
        if limit is None:
            continue
        table, _, key = name.partition(".")
        value = getattr(getattr(Tables.model_validate(values), table), key)  # or its default
        if value is None or value <= limit:
            continue
        source = sources.get(name, "")
        if source and not source.endswith(RECORDED):
            raise SpecError(
                f"{source} is {describe(value)}, but this site allows at most {describe(limit)}.",
                hint=f"The limit is {limit_name} in [limits] of {SITE_FILE}.",
            )
        values.setdefault(table, {})[key] = limit
