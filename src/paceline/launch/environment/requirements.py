"""Read a project's requirements, from all files that hold them, into one list for a build.

pip and uv read the lines; here they only have to be found, and identified in a digest.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SpecError
from paceline.spec.job import Job
from paceline.spec.load import laptop_path
from paceline.spec.shell_text import cluster, to_type
from paceline.spec.user_files import expand_home

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
_METADATA = ("pyproject.toml", "setup.py", "setup.cfg")
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
    present = [name for name in DEFAULT_FILES if (job.folder / name).is_file()]
    found = Requirements(files=list(job.environment.requirements) or present[:1])
    if not found.files:
        raise _nothing_to_build_from(job)
    beside = []
    for name in found.files:
        file, _, extras = name.partition("[") if ".toml[" in name else (name, "", "")
        path = _existing(job, file, "environment.requirements")
        beside.append(path.with_name(CONSTRAINTS))
        if path.name in EXPORTS:
            raise _not_exported(path)
        if path.suffix == ".toml":
            found.lines += _read_pyproject(path, re.findall(r"[\w.-]+", extras))
        else:
            _read_file(path, found.lines, found.constraints)
    if job.environment.constraints is not None:
        path = _existing(job, job.environment.constraints, "environment.constraints")
        _read_file(path, found.constraints, found.constraints)
    else:
        for path in (path for path in dict.fromkeys(beside) if path.is_file()):
            found.notes.append(f"the build uses the constraints in {laptop_path(path)}")
            _read_file(path, found.constraints, found.constraints)
    found.local = dict(_local_packages(found.lines, job.folder))
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


def _missing(who: str, path: Path, hint: str = "Correct the path.") -> SpecError:
    return SpecError(f"{who} {laptop_path(path)}, which does not exist{_not_sent()}.", hint=hint)


def _not_sent() -> str:
    """Return what else may be the reason if a file of the laptop is not here."""
    return ", or git ignores it, so that it was not sent" if cluster() else ""


def _existing(job: Job, name: str, key: str) -> Path:
    path = job.folder / expand_home(name)
    if not path.is_file():
        source = job.source(key)
        raise _missing("You named" if source == "FILE" else f"{source} names", path)
    return path


def _read_file(path: Path, lines: list[str], constraints: list[str]) -> None:
    """Add the lines of a file for pip, and of the files that it includes: the build reads a copy
    elsewhere.
    """
    for line in map(str.strip, path.read_text(encoding="utf-8-sig").splitlines()):
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
            _read_file(other, constraints if is_constraint else lines, constraints)
        else:
            raise _missing(f"{laptop_path(path)} names", other)


def _read_pyproject(path: Path, extras: list[str]) -> list[str]:
    """Return `[project] dependencies`, and those of the extras, which may name others:
    `all = ["paceline[torch,gpu]"]`.
    """
    where, text = laptop_path(path), path.read_text(encoding="utf-8")
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
            named = re.findall(r"[\w.-]+", own[1]) if own else []
            pending += [each for each in named if each not in pending]
            lines += [] if own else [line]
    return list(dict.fromkeys(lines))


def _local_packages(lines: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths among the lines with a digest of their content: other content is another
    environment.
    """
    for line in lines:
        if (match := _LOCAL.match(line)) is not None:
            path = folder / match[2]
            if not path.exists():
                hint = "Write paths relative to the project's folder."
                raise _missing(f"The requirement {line!r} refers to", path, hint)
            yield match[2], _digest(path, is_link=match[1] is not None)


def _digest(path: Path, *, is_link: bool) -> str:
    """Return a digest of a file, or of a package's folder; for an editable package, of its metadata
    alone.
    """
    digest = hashlib.sha256()
    files = [path / name for name in _METADATA] if is_link else [path, *sorted(path.rglob("*"))]
    for file in files:
        parts = file.relative_to(path).parts
        is_source = not any(each in _NOT_SOURCE or ".egg-info" in each for each in parts)
        if is_source and file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{'/'.join(parts)}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
