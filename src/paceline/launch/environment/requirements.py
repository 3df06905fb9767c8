"""Read a project's requirements, from all files that hold them, into one list for a build."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.files.sent_code import laptop_path
from paceline.contract.typed_command import cluster, to_type
from paceline.errors import SpecError
from paceline.launch.environment.requirement_lines import (
    DEFAULT_FILES,
    EXPORTS,
    from_pipfile,
    from_pipfile_lock,
    from_pyproject,
)
from paceline.spec import Job
from paceline.spec.home_path import expand_home

CONSTRAINTS = "constraints.txt"
_FILE_OPTION = re.compile(
    r"(-r|--requirement|-c|--constraint|-f|--find-links)(?:\s+|=|(?<=^-[rcf]))(.+)"
)
_EDITABLE = re.compile(r"(-e|--editable)(\s+|=)")
_METADATA = {"pyproject.toml", "setup.py", "setup.cfg"}
_NOT_SOURCE = {
    ".git",
    "__pycache__",
    ".venv",
    "venv",
    "build",
    "dist",
    ".tox",
    ".mypy_cache",
    ".ruff_cache",
}


@dataclass
class Requirements:
    """Lines for pip, with the files that they refer to read in; `local` identifies packages in folders."""

    files: list[str] = field(default_factory=list)  # as the user named them
    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    local: dict[str, str] = field(default_factory=dict)  # path -> digest of its content
    notes: list[str] = field(default_factory=list)


def read_requirements(job: Job) -> Requirements:
    """Read what `[environment] requirements` and `constraints` name, or what the project's folder has."""
    named = (
        list(job.environment.requirements)
        or [name for name in DEFAULT_FILES if (job.folder / name).is_file()][:1]
    )
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
            found.notes.append(f"the build uses the constraints in {laptop_path(path)}")
            _read_lines(path, found, constraint=True)
    found.local = dict(_local_packages(found.lines, job.folder))
    if linked := [line for line in found.lines if _EDITABLE.match(line)]:
        found.notes.append(
            f"{linked[0]} is a link to that folder: jobs in the queue see its code as it is when they start"
        )
    return found


def _nothing_to_build_from(job: Job) -> SpecError:
    for name, export in EXPORTS.items():
        if (job.folder / name).exists():
            return SpecError(
                f"pip cannot install {laptop_path(job.folder / name)}.",
                hint=f"Export it first: {export}",
            )
    return SpecError(
        f"{laptop_path(job.folder)} has nothing to build from: none of {', '.join(DEFAULT_FILES)}{_not_sent()}.",
        hint=f"Write a requirements.txt there, or name a file with `{to_type('env build FILE')}`.",
    )


def _not_sent() -> str:
    """Return what else may be the reason if a file of the laptop is not here."""
    return ", or git ignores it, so that it was not sent" if cluster() else ""


def _parts(name: str) -> tuple[str, tuple[str, ...]]:
    """Split `pyproject.toml[torch,gpu]` into the file and its extras."""
    match = re.fullmatch(r"(.*?)\[([\w., -]*)\]", name)
    return (
        (match[1], tuple(extra.strip() for extra in match[2].split(","))) if match else (name, ())
    )


def _existing(job: Job, name: str, key: str) -> Path:
    path = job.folder / expand_home(name)
    if not path.is_file():
        source = job.source(key)
        who = f"{source} names" if source != "FILE" else "You named"
        missing = f"which does not exist{_not_sent() if laptop_path(path) != path else ''}"
        raise SpecError(f"{who} {laptop_path(path)}, {missing}.", hint="Correct the path.")
    return path


def _read_one(job: Job, name: str, found: Requirements) -> None:
    file, extras = _parts(name)
    path = _existing(job, file, "environment.requirements")
    where, base = str(laptop_path(path)), path.name
    if base in EXPORTS:
        raise SpecError(f"pip cannot install {where}.", hint=f"Export it first: {EXPORTS[base]}")
    if extras and path.suffix != ".toml":
        raise SpecError(
            f"{where} has no extras: only pyproject.toml has.", hint=f"Remove [{','.join(extras)}]."
        )
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
        raise SpecError(
            f"Cannot read {laptop_path(path)}: {problem}.", hint="Fix the file, or name another."
        ) from None


def _read_lines(
    path: Path, found: Requirements, *, constraint: bool = False, above: tuple[Path, ...] = ()
) -> None:
    """Read a requirements or constraints file, and the files that it refers to."""
    if path in above:
        raise SpecError(
            f"{path} includes itself through {above[-1]}.", hint="Remove one of the two lines."
        )
    for number, line in _logical_lines(_text(path)):
        match = _FILE_OPTION.fullmatch(line)
        if match is None:
            (found.constraints if constraint else found.lines).append(line)
            continue
        option, name = match[1].lstrip("-")[0], shlex.split(match[2])[0]
        other = path.parent / name
        if option == "f":
            # pip looks next to the file with this line, but the build reads a copy elsewhere.
            found.lines.append(f"--find-links {other.absolute() if other.exists() else name}")
        elif "://" in name or not other.is_file():
            raise SpecError(
                f"{laptop_path(path)}, line {number} names {laptop_path(other)}, which does not exist{_not_sent()}.",
                hint="Correct the path.",
            )
        else:
            _read_lines(other, found, constraint=constraint or option == "c", above=(*above, path))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, continuations joined, each with the number of its last line."""
    joined = ""
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if plain.endswith("\\"):
            joined += plain[:-1]
            continue
        whole = (joined + plain).strip()
        joined = ""
        if whole:
            yield number, whole


# -- packages in folders ---------------------------------------------------------------------------------


def _local_packages(lines: Iterable[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths among the lines with a digest of their content: other content is another environment."""
    for line in lines:
        editable = _EDITABLE.match(line)
        name = line[editable.end() :] if editable else line
        name = (
            re.sub(r"^[\w.\[\],-]+\s*@\s*(?=file:)", "", name)
            .removeprefix("file://")
            .removeprefix("file:")
        )
        name = re.sub(r"(\[[\w,. -]*\])?(\s*;.*)?(\s+--.*)?$", "", name).strip()
        path = folder / name
        if "://" in name or name.startswith("-") or not (os.sep in name or name in (".", "..")):
            continue
        if not path.exists():
            raise SpecError(
                f"The requirement {line!r} refers to {laptop_path(path)}, which does not exist{_not_sent()}.",
                hint="Write paths relative to the project's folder.",
            )
        yield name, _digest(path, only_metadata=editable is not None)


def _digest(path: Path, *, only_metadata: bool) -> str:
    """Return a digest of a file, or of a package's folder; for an editable package, of its metadata alone."""
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
        return digest.hexdigest()
    for root, folders, names in os.walk(path):
        folders[:] = sorted(
            name for name in folders if name not in _NOT_SOURCE and not name.endswith(".egg-info")
        )
        if only_metadata:
            folders[:] = []
        for name in sorted(names):
            file = Path(root, name)
            if (
                name.endswith(".pyc")
                or not file.is_file()
                or (only_metadata and name not in _METADATA)
            ):
                continue
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
