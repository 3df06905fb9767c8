"""The staging request: which paths go to the node, under which names, and which come back."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import EnvironmentProblem, UsageError

PACKS = ".staged"  # next to the experiments of a project
JOB_TMP = "SLURM_TMPDIR"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


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
    folder: str  # the folder on the node, if set; its variables are expanded there
    packs: Path
    limit: int = 0  # bytes that the site allows on one node; 0 for any number


def read_request(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> StagingRequest:
    """Return the request of a launch spec. Paths need not exist yet; invalid or clashing names are
    errors.
    """
    base = Path(launch_spec.scratch) / launch_spec.project
    return make_request(launch_spec.data, base=base, environ=environ)


def make_request(
    data: Mapping[str, Any], *, base: Path, environ: Mapping[str, str]
) -> StagingRequest:
    """Resolve `[data]`; relative paths start at `base`, which is `<scratch>/<project>`."""
    items: dict[str, Item] = {}
    for text in data.get("stage", ()):
        item = _make_item(str(text), base, environ)
        known = items.setdefault(item.name, item)
        if known.source != item.source:
            raise UsageError(
                f"[data] stage: {known.source} and {item.source} would both become {item.name!r} "
                "on the node.",
                hint="Stage the folder that contains both, or move one of them.",
            )
    collect = tuple(str(pattern) for pattern in data.get("collect", ()))
    for pattern in collect:
        _check_relative(pattern, "collect", "a path below the node's data folder")
    # A path inside another staged folder comes with that folder.
    outermost = [
        item
        for item in items.values()
        if not any(item.name.startswith(f"{other}/") for other in items)
    ]
    return StagingRequest(
        items=tuple(outermost),
        collect=collect,
        keep=float(data.get("keep") or 0),
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


def choose_base(request: StagingRequest, environ: Mapping[str, str]) -> Path:
    """Return the node's folder for data: the requested one, else the job's own, else the machine's.

    Data that `keep` leaves for later jobs must outlive this one.
    """
    own, tmp = environ.get(JOB_TMP, ""), environ.get("TMPDIR", "")
    if request.folder:
        # all variables of a path of this node, such as /local/$USER/$SLURM_JOB_ID
        text = _expand(request.folder, environ)
        folder = VARIABLE.sub(lambda match: _value(match, text, environ), text)
        if request.keep and own and _is_inside(folder, own):
            raise UsageError(
                f"[data] keep: {folder} is inside the job's own folder (${JOB_TMP}), which is "
                "removed with the job.",
                hint="Set folder in [data] to a permanent one, or remove keep.",
            )
        return Path(folder)
    candidates = [own, tmp, tempfile.gettempdir()]
    if request.keep:
        job = environ.get("SLURM_JOB_ID", "")
        is_of_job = (own and _is_inside(tmp, own)) or (job and job in tmp)
        candidates = ["" if is_of_job else tmp]
    for folder in candidates:
        if folder and os.access(folder, os.W_OK):
            return Path(folder)
    return Path("/tmp")


def _make_item(text: str, base: Path, environ: Mapping[str, str]) -> Item:
    path = Path(_expand(text, environ))
    if not path.is_absolute():
        _check_relative(text, "stage", "a path without ..")
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


def _check_relative(text: str, key: str, expected: str) -> None:
    parts = Path(text).parts
    if not parts or Path(text).is_absolute() or ".." in parts or "\0" in text:
        raise UsageError(
            f"Invalid path {text!r} in {key} of [data]: use {expected}.",
            hint="For example, results/*.csv.",
        )


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand `~` or one variable at the start; a later $ may be part of a name."""
    if text == "~" or text.startswith("~/"):
        return environ.get("HOME", "~") + text[1:]
    match = VARIABLE.match(text)
    if match is None or text[match.end() :][:1] not in ("", "/"):
        return text
    return _value(match, text, environ) + text[match.end() :]


def _value(match: re.Match[str], text: str, environ: Mapping[str, str]) -> str:
    name = match[1] or match[2]
    if not environ.get(name):
        raise UsageError(
            f"[data]: {text!r} uses ${name}, which is not set here.", hint=f"Set {name}."
        )
    return environ[name]


def _is_inside(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
