"""Read what a project needs, from all files that say it, into one list that a build can go by later."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SpecError
from paceline.plan.environment.requirements import (
    EXPORTS,
    FOUND_BY_ITSELF,
    from_pipfile,
    from_pipfile_lock,
    from_pyproject,
)
from paceline.spec import Job

CONSTRAINTS = "constraints.txt"
_FILE_OPTION = re.compile(r"(-r|--requirement|-c|--constraint|-f|--find-links)(?:\s+|=|(?<=^-[rcf]))(.+)")
_EDITABLE = re.compile(r"(-e|--editable)(\s+|=)")
_METADATA = {"pyproject.toml", "setup.py", "setup.cfg"}
_NOT_SOURCE = {".git", "__pycache__", ".venv", "venv", "build", "dist", ".tox", ".mypy_cache", ".ruff_cache"}


@dataclass
class Requirements:
    """Lines for pip, without files that they refer to; `local` tells what is in packages that lie in folders."""

    files: list[str] = field(default_factory=list)  # as they were named
    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    local: dict[str, str] = field(default_factory=dict)  # path -> digest of its content
    notes: list[str] = field(default_factory=list)


def read_requirements(job: Job) -> Requirements:
    """Everything that `[environment] requirements` and `constraints` name; else what the project's folder has."""
    asked = job.environment.requirements
    named = list(asked) or [name for name in FOUND_BY_ITSELF if (job.folder / name).is_file()][:1]
    if not named:
        raise _nothing_to_build_from(job)
    found = Requirements(files=named)
    for name in named:
        _read_one(job, name, found)
    constraints = job.environment.constraints
    if constraints is not None:
        _read_lines(_existing(job, constraints, "environment.constraints"), found, constraint=True)
    else:
        beside = {(job.folder / _parts(name)[0]).parent / CONSTRAINTS for name in named}
        for path in sorted(path for path in beside if path.is_file()):
            found.notes.append(f"held to {path}")
            _read_lines(path, found, constraint=True)
    found.local = dict(_local_packages(found.lines, job.folder))
    if linked := [line for line in found.lines if _EDITABLE.match(line)]:
        found.notes.append(
            f"{linked[0]}: a link to that folder, whose code jobs in the queue see as it is then"
        )
    return found


def _nothing_to_build_from(job: Job) -> SpecError:
    for name, export in EXPORTS.items():
        if (job.folder / name).exists():
            return SpecError(
                f"{job.folder / name} cannot be installed by pip", hint=f"write it out first: {export}"
            )
    return SpecError(
        f"there is nothing to build from in {job.folder}: none of {', '.join(FOUND_BY_ITSELF)}",
        hint="write a requirements.txt, or name the file: paceline env build FILE",
    )


def _parts(name: str) -> tuple[str, tuple[str, ...]]:
    """`pyproject.toml[torch,gpu]`: the file, and its extras."""
    match = re.fullmatch(r"(.*?)\[([\w., -]*)\]", name)
    return (match[1], tuple(word.strip() for word in match[2].split(","))) if match else (name, ())


def _existing(job: Job, name: str, key: str) -> Path:
    path = job.folder / Path(name).expanduser()
    if not path.is_file():
        raise SpecError(f"{job.source(key)}: there is no file {path}", hint="mend its name")
    return path


def _read_one(job: Job, name: str, found: Requirements) -> None:
    file, extras = _parts(name)
    path = _existing(job, file, "environment.requirements")
    where, base = str(path), path.name
    if base in EXPORTS:
        raise SpecError(f"{where} cannot be installed by pip", hint=f"write it out first: {EXPORTS[base]}")
    if extras and path.suffix != ".toml":
        raise SpecError(f"{where}: only a pyproject.toml has extras", hint=f"leave [{','.join(extras)}] out")
    if base == "Pipfile":
        found.lines += from_pipfile(_text(path), where=where)
    elif base == "Pipfile.lock":
        lines, notes = from_pipfile_lock(_text(path), where=where)
        found.lines += lines
        found.notes += notes
    elif path.suffix == ".toml":
        found.lines += from_pyproject(_text(path), where=where, extras=extras)
    else:
        _read_lines(path, found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(f"{path}: cannot be read: {problem}", hint="mend it, or name another") from None


def _read_lines(
    path: Path, found: Requirements, *, constraint: bool = False, above: tuple[Path, ...] = ()
) -> None:
    """A requirements or constraints file, with those that it refers to read into it."""
    if path in above:
        raise SpecError(f"{path}: refers to itself, by {above[-1]}", hint="take one of the two lines out")
    for number, line in _logical_lines(_text(path)):
        match = _FILE_OPTION.fullmatch(line)
        if match is None:
            (found.constraints if constraint else found.lines).append(line)
            continue
        option, name = match[1].lstrip("-")[0], shlex.split(match[2])[0]
        other = path.parent / name
        if option == "f":
            # pip looks beside the file that says it; what a build is given lies elsewhere.
            found.lines.append(f"--find-links {other.absolute() if other.exists() else name}")
        elif "://" in name or not other.is_file():
            raise SpecError(f"{path}, line {number}: there is no file {other}", hint="mend its name")
        else:
            _read_lines(other, found, constraint=constraint or option == "c", above=(*above, path))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, continuations joined; each with the number of its last line."""
    held = ""
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if plain.endswith("\\"):
            held += plain[:-1]
            continue
        whole = (held + plain).strip()
        held = ""
        if whole:
            yield number, whole


# -- packages that lie in folders ------------------------------------------------------------------------


def _local_packages(lines: Iterable[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Paths among the lines, each with a digest of what is there: another content is another environment."""
    for line in lines:
        editable = _EDITABLE.match(line)
        word = line[editable.end() :] if editable else line
        word = (
            re.sub(r"^[\w.\[\],-]+\s*@\s*(?=file:)", "", word).removeprefix("file://").removeprefix("file:")
        )
        word = re.sub(r"(\[[\w,. -]*\])?(\s*;.*)?(\s+--.*)?$", "", word).strip()
        path = folder / word
        if "://" in word or word.startswith("-") or not (os.sep in word or word in (".", "..")):
            continue
        if not path.exists():
            raise SpecError(
                f"the requirement {line!r}: there is no {path}",
                hint="paths are taken from the project's folder",
            )
        yield word, _digest(path, only_metadata=editable is not None)


def _digest(path: Path, *, only_metadata: bool) -> str:
    """Of a file's bytes, or of all that a package's folder holds; a link to it is told by its metadata alone."""
    found = hashlib.sha256()
    if path.is_file():
        found.update(path.read_bytes())
        return found.hexdigest()
    for root, folders, names in os.walk(path):
        folders[:] = sorted(
            name for name in folders if name not in _NOT_SOURCE and not name.endswith(".egg-info")
        )
        if only_metadata:
            folders[:] = []
        for name in sorted(names):
            file = Path(root, name)
            if name.endswith(".pyc") or not file.is_file() or (only_metadata and name not in _METADATA):
                continue
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"{file.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
    return found.hexdigest()
