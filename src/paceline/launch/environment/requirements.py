"""Read a project's requirements, from all files that hold them, into one list for a build.

pip and uv read the lines; here they only have to be found, and identified in a digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SpecError
from paceline.spec.home_path import expand_home
from paceline.spec.job import Job
from paceline.spec.sent_code import laptop_path
from paceline.spec.shell_text import cluster, to_type

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

CONSTRAINTS = "constraints.txt"
DEFAULT_FILES = ("requirements.lock", "requirements.txt", "pyproject.toml")
# Files of other tools, and the command that exports each to a format that pip reads.
EXPORTS = {
    "uv.lock": "uv export --format requirements-txt --no-hashes --output-file requirements.lock",
    "poetry.lock": "poetry export --without-hashes --output requirements.lock",
    "pdm.lock": "pdm export --without-hashes --output requirements.lock",
    "pylock.toml": "uv pip compile pyproject.toml --output-file requirements.lock",
    "Pipfile.lock": "pipenv requirements --hash > requirements.lock",
    "Pipfile": "pipenv lock && pipenv requirements --hash > requirements.lock",
    "environment.yml": 'conda env create --file environment.yml, then kind = "conda" in '
    "[environment]",
    "environment.yaml": 'conda env create --file environment.yaml, then kind = "conda" in '
    "[environment]",
    "setup.py": "pip-compile setup.py --output-file requirements.lock",
    "setup.cfg": "pip-compile setup.cfg --output-file requirements.lock",
}
_INCLUDE = re.compile(
    r"(-r|--requirement|-c|--constraint|-f|--find-links)[\s=]*([^\s#]+|'.*'|\".*\")\s*(?:#.*)?"
)
# ./package, -e ./package, package @ file:///path, vendor/package.whl
_LOCAL = re.compile(
    r"(-e\s+|--editable[\s=]+)?(?:[\w.\[\],-]+\s*@\s*)?(?:file:(?://)?)?"
    r"(\.?\.?/[^\s;\[]*|\.\.?(?=[\s;\[]|$)|[\w.-]+/[^\s;\[]*)"
)
_METADATA = {"pyproject.toml", "setup.py", "setup.cfg"}
_NOT_SOURCE = {".git", "__pycache__", ".venv", "venv", "build", "dist", ".tox", ".mypy_cache"}


@dataclass
class Requirements:
    """Lines for pip, with the files that they refer to read in; `local` identifies packages in
    folders.
    """

    files: list[str] = field(default_factory=list)  # as the user named them
    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    local: dict[str, str] = field(default_factory=dict)  # path -> digest of its content
    notes: list[str] = field(default_factory=list)


def read_requirements(job: Job) -> Requirements:
    """Read what `[environment] requirements` and `constraints` name, or what the project's folder
    has.
    """
    named = list(job.environment.requirements) or [
        name for name in DEFAULT_FILES if (job.folder / name).is_file()
    ]
    if not named:
        raise _nothing_to_build_from(job)
    found = Requirements(files=named if job.environment.requirements else named[:1])
    beside: dict[Path, None] = {}
    for name in found.files:
        file, extras = _split_extras(name)
        path = _existing(job, file, "environment.requirements")
        beside[path.parent / CONSTRAINTS] = None
        if path.name in EXPORTS:
            raise _not_exported(path)
        if path.suffix == ".toml":
            found.lines += _read_pyproject(path, extras)
        elif extras:
            raise SpecError(
                f"{laptop_path(path)} has no extras: only pyproject.toml has.",
                hint=f"Remove [{','.join(extras)}].",
            )
        else:
            _read_file(path, found.lines, found.constraints)
    if job.environment.constraints is not None:
        path = _existing(job, job.environment.constraints, "environment.constraints")
        _read_file(path, found.constraints, found.constraints)
    else:
        for path in (path for path in beside if path.is_file()):
            found.notes.append(f"the build uses the constraints in {laptop_path(path)}")
            _read_file(path, found.constraints, found.constraints)
    found.local = dict(_local_packages(found.lines, job.folder))
    if linked := [line for line in found.lines if line.startswith(("-e", "--editable"))]:
        found.notes.append(
            f"{linked[0]} is a link to that folder: jobs in the queue see its code as it is when "
            "they start"
        )
    return found


def _nothing_to_build_from(job: Job) -> SpecError:
    other = next((job.folder / name for name in EXPORTS if (job.folder / name).exists()), None)
    if other is not None:
        return _not_exported(other)
    return SpecError(
        f"{laptop_path(job.folder)} has nothing to build from: none of "
        f"{', '.join(DEFAULT_FILES)}{_not_sent()}.",
        hint=f"Write a requirements.txt there, or name a file with `{to_type('env build FILE')}`.",
    )


def _not_exported(path: Path) -> SpecError:
    return SpecError(
        f"pip cannot install {laptop_path(path)}.", hint=f"Export it first: {EXPORTS[path.name]}"
    )


def _not_sent() -> str:
    """Return what else may be the reason if a file of the laptop is not here."""
    return ", or git ignores it, so that it was not sent" if cluster() else ""


def _split_extras(name: str) -> tuple[str, list[str]]:
    """Split `pyproject.toml[torch,gpu]` into the file and its extras."""
    file, _, extras = name.removesuffix("]").partition("[")
    return file, [extra.strip() for extra in extras.split(",") if extra.strip()]


def _existing(job: Job, name: str, key: str) -> Path:
    path = job.folder / expand_home(name)
    if not path.is_file():
        source = job.source(key)
        who = f"{source} names" if source != "FILE" else "You named"
        missing = f"which does not exist{_not_sent() if laptop_path(path) != path else ''}"
        raise SpecError(f"{who} {laptop_path(path)}, {missing}.", hint="Correct the path.")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(
            f"Cannot read {laptop_path(path)}: {problem}.", hint="Fix the file, or name another."
        ) from None


def _read_file(
    path: Path, lines: list[str], constraints: list[str], above: tuple[Path, ...] = ()
) -> None:
    """Add the lines of a file for pip, and of the files that it includes: the build reads a copy
    elsewhere.
    """
    if path in above:
        raise SpecError(
            f"{laptop_path(path)} includes itself.", hint="Remove the line that names it."
        )
    for line in map(str.strip, _text(path).splitlines()):
        match = _INCLUDE.fullmatch(line)
        if match is None:
            lines += [line] if line and not line.startswith("#") else []
            continue
        name = match[2].strip("'\"")
        other = path.parent / name
        if match[1] in ("-f", "--find-links"):
            lines.append(f"--find-links {other.absolute() if other.exists() else name}")
        elif other.is_file():
            is_constraint = match[1] in ("-c", "--constraint")
            _read_file(other, constraints if is_constraint else lines, constraints, (*above, path))
        else:
            raise SpecError(
                f"{laptop_path(path)} names {laptop_path(other)}, which does not exist"
                f"{_not_sent()}.",
                hint="Correct the path.",
            )


def _read_pyproject(path: Path, extras: list[str]) -> list[str]:
    """Return `[project] dependencies`, and those of the extras, which may name others:
    `all = ["paceline[torch,gpu]"]`.
    """
    where, text = laptop_path(path), _text(path)
    try:
        project = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(
            f"{where} is not valid TOML: {problem}.", hint="Correct the file."
        ) from None
    if not project or "dependencies" in project.get("dynamic", []):
        tool = "poetry.lock" if "tool.poetry" in text else "setup.py"
        raise SpecError(
            f"{where} does not list its dependencies in [project].",
            hint=f"Export them first: {EXPORTS[tool]}",
        )
    # `my-pkg[gpu]` means the project `my_pkg`, too
    name = "[-_.]+".join(map(re.escape, re.split(r"[-_.]+", project.get("name", ""))))
    known = project.get("optional-dependencies", {})
    lines, pending = list(project.get("dependencies", [])), list(extras)
    for extra in pending:
        if extra not in known:
            raise SpecError(
                f"{where} has no extra {extra!r}.",
                hint=f"Choose one of: {', '.join(sorted(known)) or 'none'}.",
            )
        for line in known[extra]:
            own = re.fullmatch(rf"{name}\s*\[([^\]]+)\]", line, re.I)
            if own is None:
                lines.append(line)
            else:
                named = [each.strip() for each in own[1].split(",")]
                pending += [each for each in named if each not in pending]
    return list(dict.fromkeys(lines))


def _local_packages(lines: Iterable[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths among the lines with a digest of their content: other content is another
    environment.
    """
    for line in lines:
        match = _LOCAL.match(line)
        if match is None:
            continue
        path = folder / match[2]
        if not path.exists():
            raise SpecError(
                f"The requirement {line!r} refers to {laptop_path(path)}, which does not exist"
                f"{_not_sent()}.",
                hint="Write paths relative to the project's folder.",
            )
        yield match[2], _digest(path, only_metadata=match[1] is not None)


def _digest(path: Path, *, only_metadata: bool) -> str:
    """Return a digest of a file, or of a package's folder; for an editable package, of its metadata
    alone.
    """
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
        return digest.hexdigest()
    for root, folders, names in os.walk(path):
        kept = [each for each in folders if each not in _NOT_SOURCE and ".egg-info" not in each]
        folders[:] = [] if only_metadata else sorted(kept)
        for name in sorted(names):
            file = Path(root, name)
            if not file.is_file() or (only_metadata and name not in _METADATA):
                continue
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
