"""Requirements as lines for pip, from pyproject.toml, Pipfile and Pipfile.lock."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from paceline.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

# Files of other tools, and the command that exports each to a format that pip reads.
EXPORTS = {
    "uv.lock": "uv export --format requirements-txt --no-hashes --output-file requirements.lock",
    "poetry.lock": "poetry export --without-hashes --output requirements.lock",
    "pdm.lock": "pdm export --without-hashes --output requirements.lock",
    "pylock.toml": "uv pip compile pyproject.toml --output-file requirements.lock",
    "environment.yml": 'conda env create --file environment.yml, then kind = "conda" in [environment]',
    "environment.yaml": 'conda env create --file environment.yaml, then kind = "conda" in [environment]',
    "setup.py": "pip-compile setup.py --output-file requirements.lock",
    "setup.cfg": "pip-compile setup.cfg --output-file requirements.lock",
}
DEFAULT_FILES = (
    "requirements.lock",
    "Pipfile.lock",
    "requirements.txt",
    "pyproject.toml",
    "Pipfile",
)
_DEFAULT_INDEX = re.compile(r"https://pypi\.(python\.)?org/simple/?")


def from_pyproject(text: str, *, where: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Return `[project] dependencies` and those of the requested extras."""
    project = _toml(text, where).get("project")
    if not isinstance(project, dict) or "dependencies" in project.get("dynamic", []):
        poetry = "tool.poetry" in text
        raise SpecError(
            f"{where} does not list its dependencies in [project].",
            hint=f"Export them first: {EXPORTS['poetry.lock' if poetry else 'setup.py']}",
        )
    lines = list(project.get("dependencies", []))
    known = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in known:
            raise SpecError(
                f"{where} has no extra {extra!r}.",
                hint=f"Choose one of: {', '.join(sorted(known)) or 'none'}.",
            )
        lines += known[extra]
    if not all(isinstance(line, str) for line in lines):
        raise SpecError(
            f"{where} has a dependency that is not a string.", hint='Write it as in "torch>=2.6".'
        )
    return _expand_own_extras(lines, project, where)


def _expand_own_extras(lines: list[str], project: Mapping[str, Any], where: str) -> list[str]:
    """Expand extras that name other extras of the same project: `all = ["paceline[torch,gpu]"]`."""
    own = name_of(str(project.get("name", "")))
    known = project.get("optional-dependencies", {})
    found: list[str] = []
    expanded: set[str] = set()
    pending = list(lines)
    while pending:
        line = pending.pop(0)
        match = re.fullmatch(r"[\w.-]+\s*\[([\w,. -]+)\]", line.strip())
        if match is None or name_of(line.strip()) != own:
            found.append(line)
            continue
        extras = [extra.strip() for extra in match[1].split(",")]
        for extra in extras:
            if extra not in known:
                raise SpecError(f"{where} has no extra {extra!r}.", hint="Correct its name.")
        pending = [
            each for extra in extras if extra not in expanded for each in known[extra]
        ] + pending
        expanded.update(extras)
    return list(dict.fromkeys(found))


def from_pipfile(text: str, *, where: str) -> list[str]:
    """Return `[packages]` of a Pipfile, and its sources."""
    values = _toml(text, where)
    lines = _sources(values.get("source", []))
    return lines + [
        _pipfile_line(name, entry, where) for name, entry in values.get("packages", {}).items()
    ]


def from_pipfile_lock(text: str, *, where: str) -> tuple[list[str], list[str]]:
    """Return the pinned packages of a Pipfile.lock, with their hashes, and notes about them."""
    try:
        values = json.loads(text)
        packages: dict[str, dict[str, Any]] = values["default"]
    except (ValueError, KeyError, TypeError):
        raise SpecError(
            f"{where} is not a Pipenv lock file.", hint="Create it again with `pipenv lock`."
        ) from None
    # pip checks either all hashes or none.
    unhashed = [name for name, entry in packages.items() if not entry.get("hashes")]
    notes = []
    if unhashed and len(unhashed) < len(packages):
        notes.append(
            f"{where} has no hash for {', '.join(unhashed[:3])}, so pip cannot check the other hashes either"
        )
    lines = _sources(values.get("_meta", {}).get("sources", []))
    for name, entry in packages.items():
        line = _pipfile_line(name, entry, where)
        if not unhashed:
            line += "".join(f" --hash={each}" for each in entry["hashes"])
        lines.append(line)
    return lines, notes


def _pipfile_line(name: str, entry: object, where: str) -> str:
    """Return a package of a Pipfile as a line for pip."""
    if isinstance(entry, str):
        entry = {"version": entry}
    if not isinstance(entry, dict):
        raise SpecError(
            f"Invalid {name} = {entry!r} in {where}.", hint='Use a version such as "*" or "==1.0".'
        )
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    marker = f" ; {entry['markers']}" if entry.get("markers") else ""
    if "git" in entry:
        reference = f"@{entry['ref']}" if entry.get("ref") else ""
        inside = f"#subdirectory={entry['subdirectory']}" if entry.get("subdirectory") else ""
        return (
            f"{name}{extras} @ git+{entry['git'].removeprefix('git+')}{reference}{inside}{marker}"
        )
    if "path" in entry:
        return f"{'-e ' if entry.get('editable') else ''}{entry['path']}{extras}{marker}"
    if "file" in entry:
        return f"{name}{extras} @ {entry['file']}{marker}"
    version = entry.get("version", "*")
    return f"{name}{extras}{'' if version == '*' else version}{marker}"


def _sources(sources: list[dict[str, Any]]) -> list[str]:
    """Return options for indexes other than PyPI, which pip's own settings may have replaced."""
    urls = [each.get("url", "") for each in sources]
    return [f"--extra-index-url {url}" for url in urls if url and not _DEFAULT_INDEX.fullmatch(url)]


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(f"{where} is not valid TOML: {problem}.", hint="Fix that line.") from None


def name_of(line: str) -> str | None:
    """Return the normalised package name of a line; None for options, paths and addresses."""
    match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[|[<>=!~;@ ]|$)", line)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match and "/" not in match[1] else None
