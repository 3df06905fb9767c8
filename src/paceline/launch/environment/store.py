"""The store of built environments: where they are, how they are identified, and which one a job uses.

`<scratch>/<project>/.environments/<key>`: the key is a hash of the build's inputs. Equal inputs share an environment,
changed ones get another, and a job in the queue keeps the one that it was submitted with.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.environment.activation import module_section, module_variables, probe
from paceline.launch.environment.build_script import IMAGE, MARKER, is_remote
from paceline.launch.run_folder import resolve_scratch
from paceline.slurm.sbatch import submission_environment
from paceline.spec.findings import PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.load import laptop_path
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.spec.user_files import expand_home

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

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

    files: list[str] = field(default_factory=list)  # relative to the project, if inside it
    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    local: dict[str, str] = field(default_factory=dict)  # path -> digest of its content


def read_requirements(job: Job) -> Requirements:
    """Read what `[environment] requirements` and `constraints` name, or what the project's folder
    has.
    """
    present = [name for name in DEFAULT_FILES if (job.folder / name).is_file()]
    typed = [name.removeprefix(f"{job.folder}/") for name in job.environment.requirements]
    found = Requirements(files=typed or present[:1])
    if not found.files:
        raise _nothing_to_build_from(job)
    for name in found.files:
        file, _, extras = name.partition("[") if ".toml[" in name else (name, "", "")
        path = _existing(job, file, "environment.requirements")
        if path.name in EXPORTS:
            raise _not_exported(path)
        if path.suffix == ".toml":
            found.lines += _read_pyproject(path, re.findall(r"[\w.-]+", extras))
        else:
            _read_file(path, found.lines, found.constraints)
    if job.environment.constraints is not None:
        path = _existing(job, job.environment.constraints, "environment.constraints")
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
            yield match[2], _digest_of(path, is_link=match[1] is not None)


def _digest_of(path: Path, *, is_link: bool) -> str:
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


STORE = ".environments"
_FORMAT = 2  # another way to build is another environment

_DESCRIBE = (
    "import json, platform, sys; print(json.dumps([sys.executable, '%d.%d' % sys.version_info[:2], "
    "sys.base_prefix, platform.machine(), sys.implementation.name]))"
)
# Keys of [environment] that mean nothing for the current Python, and the kind that they are for.
_KIND_OF = {"requirements": "venv", "path": "venv", "image": "container", "base": "container"}


@dataclass(frozen=True)
class Python:
    """The Python that creates a venv, as found here."""

    command: str
    version: str
    prefix: str
    machine: str
    implementation: str


@dataclass(frozen=True)
class EnvironmentInputs:
    """Everything that determines the content of an environment."""

    kind: str  # venv or container
    requirements: Requirements
    python: Python | None = None
    base: str | None = None
    base_state: str = ""  # size and time of a base that is a file or a folder here
    modules: tuple[str, ...] = ()
    module_paths: tuple[str, ...] = ()
    system_packages: bool = False
    horovod: bool = False

    @property
    def key(self) -> str:
        """A hash of the inputs, without the project's path and the names of files."""
        inputs = asdict(self)
        inputs["requirements"] = {
            name: inputs["requirements"][name] for name in ("lines", "constraints", "local")
        }
        if self.python is not None:
            inputs["python"].pop("command")
        text = json.dumps([_FORMAT, inputs], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def origin(self) -> str:
        return ", ".join(self.requirements.files)


@dataclass(frozen=True)
class StoredEnvironment:
    """One environment of the store: a link to where it was built, made when it was complete."""

    path: Path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def is_complete(self) -> bool:
        return os.path.isfile(self.path / MARKER)

    @property
    def image(self) -> Path:
        return self.path / IMAGE


def store_path(job: Job, environ: Mapping[str, str]) -> Path:
    return resolve_scratch(job, environ) / job.project_name / STORE


def environment_inputs(job: Job, environ: Mapping[str, str]) -> EnvironmentInputs:
    """Return the inputs of the environment that this job uses."""
    environment = job.environment
    if environment.kind == "container":
        base = environment.base or environment.image
        assert base is not None
        requirements = read_requirements(job) if environment.requirements else Requirements()
        return EnvironmentInputs(
            "container", requirements, base=base, base_state=_state_of(job, base)
        )
    return EnvironmentInputs(
        "venv",
        read_requirements(job),
        python=find_python(job, environ),
        modules=environment.modules,
        module_paths=environment.module_paths,
        system_packages=environment.system_packages,
        horovod=environment.horovod,
    )


def _state_of(job: Job, base: str) -> str:
    """Return what changes when the base image is replaced."""
    if is_remote(base):
        return ""
    path = job.folder / expand_home(base)
    if not path.exists():
        raise SpecError(
            f"{job.source('environment.base')} names {path}, which does not exist.",
            hint="Name a file, a folder, or an address such as docker://python:3.12.",
        )
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def find_python(job: Job, environ: Mapping[str, str]) -> Python:
    """Return the Python that builds: the named one, that of the modules, or the one that runs this."""
    environment = job.environment
    name = environment.base_python or ("python3" if environment.modules else None)
    if name is None:
        version = "{}.{}".format(*sys.version_info[:2])
        return Python(
            sys.executable, version, sys.base_prefix, platform.machine(), sys.implementation.name
        )
    command = str(job.folder / expand_home(name)) if os.sep in name else name
    variables = {**module_variables(environment, environ), **environment.variables}
    lines = [f"export {key}={quote(value)}" for key, value in variables.items()]
    lines += [*module_section(environment).lines(), *environment.setup]
    result = probe(
        lines,
        f"exec {quote(command)} -c {quote(_DESCRIBE)}",
        environ=submission_environment(environ, ()).variables,
    )
    if result.code != 0:
        raise EnvironmentProblem(
            f"Cannot run {command}, the Python that builds the environment: {result.failure or result.last_line}",
            hint="Name another with base_python in [environment], or correct modules and setup.",
        )
    return Python(command, *json.loads(result.out.strip().splitlines()[-1])[1:])


def resolve_environment(job: Job, environ: Mapping[str, str]) -> Job:
    """Return the job with the path of its environment, if that is built from requirements."""
    environment = job.environment
    if environment.kind == "venv" and environment.path is None and environment.requirements:
        key, source = "path", "requirements"
    elif environment.kind == "container" and environment.image is None and environment.base:
        key, source = "image", "base"
    else:
        return job
    stored = StoredEnvironment(store_path(job, environ) / environment_inputs(job, environ).key)
    value = str(stored.path if key == "path" else stored.image)
    resolved = environment.model_copy(update={key: value})
    return replace(
        job,
        tables=job.tables.model_copy(update={"environment": resolved}),
        sources={**job.sources, f"environment.{key}": job.source(f"environment.{source}")},
    )


def check_built(job: Job) -> list[Finding]:
    """Check that the job's environment is built, if it has to be."""
    environment = job.environment
    if environment.kind == "current":
        unused = [key for key in _KIND_OF if getattr(environment, key)]
        if not unused:
            return []
        text = f"{job.source(f'environment.{unused[0]}')} is set, but the run uses this Python."
        hint = f'Set kind = "{_KIND_OF[unused[0]]}" in [environment].'
        return [Finding("environment", WARNING, text, hint)]
    path = environment.path if environment.kind == "venv" else environment.image
    folder = Path(path or "") if environment.kind == "venv" else Path(path or "").parent
    if folder.parent.name != STORE or StoredEnvironment(folder).is_complete:
        return []
    origin = ", ".join(environment.requirements) or environment.base
    text = f"The environment from {origin} is not built, or its inputs have changed since."
    return [Finding("environment", PROBLEM, text, "Build it: paceline env build")]


def require_built(job: Job) -> None:
    """Raise if the environment of a run on this machine is not built."""
    for finding in check_built(job):
        raise EnvironmentProblem(finding.text, hint=f"{finding.hint} --local")
