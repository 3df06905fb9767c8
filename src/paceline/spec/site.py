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
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.spec.quantities import show_seconds
from paceline.spec.settings import Site, Tables, explain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

log = logging.getLogger(__name__)

SITE_FILE = Path("/etc/paceline/site.toml")
# what a run had when it was submitted, perhaps before there was a limit
RECORDED = "the run's settings"
_OURS = "Your administrators maintain this file."


def find_site() -> Site:
    """Return what this machine's site sets."""
    return read_site(SITE_FILE)


@functools.cache
def read_site(path: Path) -> Site:
    """Read a site's file. One that anybody but root can change is ignored, with a note."""
    if not path.is_file():
        return Site()
    for each in (path, path.parent):
        status = os.stat(each)
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning("ignoring %s: users other than root can write to %s", path, each)
            return Site()
    try:
        return Site.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as problem:
        error = explain(problem, where=str(path), root=Site)
        raise SpecError(error.message, hint=f"{error.hint} {_OURS}".strip()) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"Cannot read {path}: {error}.", hint=_OURS) from None


# The key of paceline.toml that a limit is for, and how its values are shown.
_LIMITED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "resume.requeues_per_day": ("requeues_per_day", str),
    "data.keep": ("keep_data", show_seconds),
}


def lower_to_limits(values: dict[str, Any], sources: Mapping[str, str], site: Site) -> None:
    """Lower what nobody has chosen to the site's limits; raise an error for what a file or a flag
    exceeds.
    """
    for name, (limit_name, describe) in _LIMITED.items():
        limit = getattr(site.limits, limit_name)
        table, _, key = name.partition(".")
        value = getattr(getattr(Tables.model_validate(values), table), key)  # or its default
        if limit is None or value is None or value <= limit:
            continue
        source = sources.get(name, "")
        if source and not source.endswith(RECORDED):
            raise SpecError(
                f"{source} is {describe(value)}, but this site allows at most {describe(limit)}.",
                hint=f"The limit is {limit_name} in [limits] of {SITE_FILE}.",
            )
        values.setdefault(table, {})[key] = limit
