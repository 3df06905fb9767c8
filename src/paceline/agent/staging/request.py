"""What was asked: which paths go to the node, under which names, and which come back."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import EnvironmentProblem, UsageError

PACKS = ".staged"  # beside the experiments of a project: archives of small files, by content


@dataclass(frozen=True)
class Item:
    """One path to stage: it lies at `source`, and will lie at `name` below the node's data folder."""

    name: str
    source: Path


@dataclass(frozen=True)
class StagingRequest:
    """`[data]`, with every path resolved."""

    items: tuple[Item, ...]
    collect: tuple[str, ...]
    keep: float  # seconds for which staged data stays on the node after its last use; 0 means not at all
    checksum: bool
    folder: str  # where on the node, if somebody said it; its variables are the node's
    packs: Path


def read_request(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> StagingRequest:
    """The wish of an order. Paths need not exist yet; names that clash or lead astray are errors."""
    return make_request(
        launch_spec.data, base=Path(launch_spec.scratch) / launch_spec.project, environ=environ
    )


def make_request(data: Mapping[str, Any], *, base: Path, environ: Mapping[str, str]) -> StagingRequest:
    """`base` is `<scratch>/<project>`: relative paths are meant from there."""
    items: dict[str, Item] = {}
    for text in data.get("stage", ()):
        item = _item(str(text), base, environ)
        known = items.get(item.name)
        if known is not None and known.source != item.source:
            raise UsageError(
                f"[data] stage: {known.source} and {item.source} would both become {item.name!r} on the node",
                hint="stage the folder that holds both, or move one of them",
            )
        items[item.name] = item
    for pattern in data.get("collect", ()):
        _check_relative(str(pattern), "collect")
    # What lies inside another staged folder comes with it.
    outer = [each for each in items.values() if not any(_is_inside(each.name, other) for other in items)]
    return StagingRequest(
        items=tuple(outer),
        collect=tuple(str(each) for each in data.get("collect", ())),
        keep=float(data.get("keep") or 0),
        checksum=data.get("verify") == "checksum",
        folder=str(data.get("folder") or ""),
        packs=base / PACKS,
    )


def check_exists(wish: StagingRequest) -> None:
    """An error that names each path that is not there."""
    lacking = [str(item.source) for item in wish.items if not item.source.exists()]
    if lacking:
        raise EnvironmentProblem(
            f"[data] stage: there is no {', no '.join(repr(path) for path in lacking)}",
            hint="relative paths are meant from <scratch>/<project>; write others in full",
        )


def _item(text: str, base: Path, environ: Mapping[str, str]) -> Item:
    path = Path(_expanded(text, environ))
    if not path.is_absolute():
        _check_relative(text, "stage")
        return Item(os.path.normpath(path), base / path)
    path = Path(os.path.normpath(path))
    if path.is_relative_to(base) and path != base:
        return Item(str(path.relative_to(base)), path)
    if not path.name:
        raise UsageError("[data] stage: found '/', expected a folder or a file", hint="name what you need")
    return Item(path.name, path)


def _check_relative(text: str, key: str) -> None:
    parts = Path(text).parts
    if not parts or Path(text).is_absolute() or ".." in parts or "\0" in text:
        expected = "a path below the node's data folder" if key == "collect" else "a path without .."
        raise UsageError(f"[data] {key}: found {text!r}, expected {expected}", hint="such as results/*.csv")


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """`~` and one variable at the start; what else looks like one may be part of a name."""
    if text == "~" or text.startswith("~/"):
        return environ.get("HOME", "~") + text[1:]
    match = re.match(r"\$(?:\{(\w+)\}|(\w+))(?=/|$)", text)
    if match is None:
        return text
    name = match[1] or match[2]
    if not environ.get(name):
        raise UsageError(f"[data]: {text!r} begins with ${name}, which is not set here", hint=f"set {name}")
    return environ[name] + text[match.end() :]


def _is_inside(name: str, other: str) -> bool:
    return name != other and name.startswith(other.rstrip("/") + "/")
