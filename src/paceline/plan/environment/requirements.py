"""What a project needs, as lines that pip understands: from pyproject.toml, Pipfile and Pipfile.lock."""

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

# Files of other tools, and how each is told to write what pip can read.
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
FOUND_BY_ITSELF = ("requirements.lock", "Pipfile.lock", "requirements.txt", "pyproject.toml", "Pipfile")
_USUAL_INDEX = re.compile(r"https://pypi\.(python\.)?org/simple/?")


def from_pyproject(text: str, *, where: str, extras: tuple[str, ...] = ()) -> list[str]:
    """`[project] dependencies`, and those of the extras that were asked for."""
    project = _toml(text, where).get("project")
    if not isinstance(project, dict) or "dependencies" in project.get("dynamic", []):
        poetry = "tool.poetry" in text
        raise SpecError(
            f"{where}: its dependencies are not in [project]",
            hint=f"write them out first: {EXPORTS['poetry.lock' if poetry else 'setup.py']}",
        )
    lines = list(project.get("dependencies", []))
    known = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in known:
            raise SpecError(
                f"{where}: there is no extra {extra!r}",
                hint=f"there are: {', '.join(sorted(known)) or 'none'}",
            )
        lines += known[extra]
    if not all(isinstance(line, str) for line in lines):
        raise SpecError(f"{where}: found a dependency that is no text", hint='such as "torch>=2.6"')
    return _with_extras_of_itself(lines, project, where)


def _with_extras_of_itself(lines: list[str], project: Mapping[str, Any], where: str) -> list[str]:
    """An extra may name others of the same project, and those others again: `all = ["paceline[torch,gpu]"]`."""
    own = name_of(str(project.get("name", "")))
    known = project.get("optional-dependencies", {})
    found: list[str] = []
    taken: set[str] = set()
    left = list(lines)
    while left:
        line = left.pop(0)
        match = re.fullmatch(r"[\w.-]+\s*\[([\w,. -]+)\]", line.strip())
        if match is None or name_of(line.strip()) != own:
            found.append(line)
            continue
        extras = [extra.strip() for extra in match[1].split(",")]
        for extra in extras:
            if extra not in known:
                raise SpecError(f"{where}: there is no extra {extra!r}", hint="mend its name")
        left = [each for extra in extras if extra not in taken for each in known[extra]] + left
        taken.update(extras)
    return list(dict.fromkeys(found))


def from_pipfile(text: str, *, where: str) -> list[str]:
    """`[packages]` of a Pipfile, and its sources."""
    values = _toml(text, where)
    lines = _sources(values.get("source", []))
    return lines + [_of_pipfile(name, said, where) for name, said in values.get("packages", {}).items()]


def from_pipfile_lock(text: str, *, where: str) -> tuple[list[str], list[str]]:
    """The pinned packages of a Pipfile.lock, with their hashes; and what there is to say about them."""
    try:
        values = json.loads(text)
        packages: dict[str, dict[str, Any]] = values["default"]
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{where}: is no lock file of pipenv", hint="write it again: pipenv lock") from None
    # pip checks either all hashes or none.
    unhashed = [name for name, said in packages.items() if not said.get("hashes")]
    notes = []
    if unhashed and len(unhashed) < len(packages):
        notes.append(
            f"{where}: {', '.join(unhashed[:3])} has no hash, so pip can check none of the others' either"
        )
    lines = _sources(values.get("_meta", {}).get("sources", []))
    for name, said in packages.items():
        line = _of_pipfile(name, said, where)
        if not unhashed:
            line += "".join(f" --hash={each}" for each in said["hashes"])
        lines.append(line)
    return lines, notes


def _of_pipfile(name: str, said: object, where: str) -> str:
    """One package in pipenv's terms, as pip writes it."""
    if isinstance(said, str):
        said = {"version": said}
    if not isinstance(said, dict):
        raise SpecError(f"{where}: {name}: found {said!r}", hint='expected a version such as "*" or "==1.0"')
    extras = f"[{','.join(said['extras'])}]" if said.get("extras") else ""
    marker = f" ; {said['markers']}" if said.get("markers") else ""
    if "git" in said:
        reference = f"@{said['ref']}" if said.get("ref") else ""
        inside = f"#subdirectory={said['subdirectory']}" if said.get("subdirectory") else ""
        return f"{name}{extras} @ git+{said['git'].removeprefix('git+')}{reference}{inside}{marker}"
    if "path" in said:
        return f"{'-e ' if said.get('editable') else ''}{said['path']}{extras}{marker}"
    if "file" in said:
        return f"{name}{extras} @ {said['file']}{marker}"
    version = said.get("version", "*")
    return f"{name}{extras}{'' if version == '*' else version}{marker}"


def _sources(sources: list[dict[str, Any]]) -> list[str]:
    """Indexes besides the usual one, which pip's own settings may have replaced."""
    urls = [each.get("url", "") for each in sources]
    return [f"--extra-index-url {url}" for url in urls if url and not _USUAL_INDEX.fullmatch(url)]


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(f"{where}: is not TOML: {problem}", hint="mend the line that it names") from None


def name_of(line: str) -> str | None:
    """The package that a line names, normalised; None for options, paths and addresses."""
    match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[|[<>=!~;@ ]|$)", line)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match and "/" not in match[1] else None
