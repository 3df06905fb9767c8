"""The staging request: which paths go to the node, under which names, and which come back."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import EnvironmentProblem, UsageError

PACKS = ".staged"  # next to the experiments of a project


@dataclass(frozen=True)
class Item:
    """One path to stage: from `source` to `name` below the node's data folder."""

    name: str
    source: Path


@dataclass(frozen=True)
class StagingRequest:
    """`[data]`, with every path resolved."""

    items: tuple[Item, ...]
    collect: tuple[str, ...]
    keep: float  # seconds that staged data stays on the node after its last use; 0 for not at all
    checksum: bool
    folder: str  # the folder on the node, if set; its variables are expanded there
    packs: Path
    limit: int = 0  # bytes that the site allows on one node; 0 for any number


def read_request(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> StagingRequest:
    """Return the request of a launch spec. Paths need not exist yet; invalid or clashing names are
    errors.
    """
    return make_request(
        launch_spec.data, base=Path(launch_spec.scratch) / launch_spec.project, environ=environ
    )


def make_request(
    data: Mapping[str, Any], *, base: Path, environ: Mapping[str, str]
) -> StagingRequest:
    """Resolve `[data]`; relative paths start at `base`, which is `<scratch>/<project>`."""
    items: dict[str, Item] = {}
    for text in data.get("stage", ()):
        item = _make_item(str(text), base, environ)
        known = items.get(item.name)
        if known is not None and known.source != item.source:
            raise UsageError(
                f"[data] stage: {known.source} and {item.source} would both become {item.name!r} "
                "on the node.",
                hint="Stage the folder that contains both, or move one of them.",
            )
        items[item.name] = item
    for pattern in data.get("collect", ()):
        _check_relative(str(pattern), "collect")
    # A path inside another staged folder comes with that folder.
    outermost = [
        item for item in items.values() if not any(_is_inside(item.name, other) for other in items)
    ]
    return StagingRequest(
        items=tuple(outermost),
        collect=tuple(str(pattern) for pattern in data.get("collect", ())),
        keep=float(data.get("keep") or 0),
        checksum=data.get("verify") == "checksum",
        folder=str(data.get("folder") or ""),
        packs=base / PACKS,
        limit=int(data.get("limit") or 0),
    )


def check_sources(request: StagingRequest) -> None:
    """Raise an error that names every path that does not exist."""
    missing = [str(item.source) for item in request.items if not item.source.exists()]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        raise EnvironmentProblem(
            f"[data] stage: {', '.join(repr(path) for path in missing)} {verb} not exist.",
            hint="Relative paths start at <scratch>/<project>; write other paths in full.",
        )


def _make_item(text: str, base: Path, environ: Mapping[str, str]) -> Item:
    path = Path(_expand(text, environ))
    if not path.is_absolute():
        _check_relative(text, "stage")
        return Item(os.path.normpath(path), base / path)
    path = Path(os.path.normpath(path))
    if path.is_relative_to(base) and path != base:
        return Item(str(path.relative_to(base)), path)
    if not path.name:
        raise UsageError(
            "Invalid path '/' in stage of [data]: use a folder or a file.",
            hint="Name what you need.",
        )
    return Item(path.name, path)


def _check_relative(text: str, key: str) -> None:
    parts = Path(text).parts
    if not parts or Path(text).is_absolute() or ".." in parts or "\0" in text:
        expected = (
            "a path below the node's data folder" if key == "collect" else "a path without .."
        )
        raise UsageError(
            f"Invalid path {text!r} in {key} of [data]: use {expected}.",
            hint="For example, results/*.csv.",
        )


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand `~` or one variable at the start; a later $ may be part of a name."""
    if text == "~" or text.startswith("~/"):
        return environ.get("HOME", "~") + text[1:]
    match = re.match(r"\$(?:\{(\w+)\}|(\w+))(?=/|$)", text)
    if match is None:
        return text
    name = match[1] or match[2]
    if not environ.get(name):
        raise UsageError(
            f"[data]: {text!r} starts with ${name}, which is not set here.", hint=f"Set {name}."
        )
    return environ[name] + text[match.end() :]


def _is_inside(name: str, other: str) -> bool:
    return name != other and name.startswith(other.rstrip("/") + "/")
