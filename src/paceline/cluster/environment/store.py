"""Environments that were built: where they are, what they are known by, and which of them a job means.

`<scratch>/<project>/.environments/<key>`: the key is a hash of all that decides what is inside. Equal inputs are one
environment, changed ones another, and a job that waits in the queue keeps the one that it was submitted with.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.checks.finding import PROBLEM, WARNING, Finding
from paceline.cluster.environment.probe import module_lines, probe
from paceline.cluster.environment.requirements import Requirements, read_requirements
from paceline.cluster.runs.folder import resolve_scratch
from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.plan.environment.build import IMAGE, LOCK, MARKER
from paceline.plan.environment.image import is_remote
from paceline.plan.environment.modules import module_section, module_variables
from paceline.plan.environment.variables import submission_environment
from paceline.plan.quote import quote
from paceline.spec import Job

STORE = ".environments"
_FORMAT = 1  # other ways to build are other environments
_SOURCE = "environment.requirements"

_DESCRIBE = (
    "import json, platform, sys; print(json.dumps([sys.executable, '%d.%d' % sys.version_info[:2], "
    "sys.base_prefix, platform.machine(), sys.implementation.name]))"
)


@dataclass(frozen=True)
class Python:
    """The Python that a venv is made with, as it was found here."""

    command: str
    version: str
    prefix: str
    machine: str
    implementation: str


@dataclass(frozen=True)
class Recipe:
    """All that decides what an environment holds."""

    kind: str  # venv or container
    requirements: Requirements
    python: Python | None = None
    base: str | None = None
    base_state: str = ""  # of a base that is a file or a folder here
    modules: tuple[str, ...] = ()
    module_paths: tuple[str, ...] = ()
    system_packages: bool = False
    horovod: bool = False

    @property
    def key(self) -> str:
        """Where the project lies is no part of it, nor are the names of files."""
        told = asdict(self)
        told["requirements"] = {
            name: told["requirements"][name] for name in ("lines", "constraints", "local")
        }
        if self.python is not None:
            told["python"].pop("command")
        text = json.dumps([_FORMAT, told], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def origin(self) -> str:
        return ", ".join(self.requirements.files)


@dataclass(frozen=True)
class Built:
    """One environment of the store."""

    path: Path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def is_complete(self) -> bool:
        return (self.path / MARKER).is_file()

    @property
    def builder(self) -> str | None:
        """Who holds the lock: "job-12", "process-host-77"."""
        try:
            return next(iter(os.listdir(f"{self.path}{LOCK}")), None)
        except OSError:
            return None

    @property
    def image(self) -> Path:
        return self.path / IMAGE

    def told(self) -> dict[str, Any]:
        """What its marker says of it; empty for one that is not complete."""
        try:
            value = json.loads((self.path / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def store_of(job: Job, environ: Mapping[str, str]) -> Path:
    return resolve_scratch(job, environ) / job.project_name / STORE


def known(store: Path) -> list[Built]:
    """All of a store, those that are being built too, the oldest first."""
    try:
        names = [entry.name for entry in os.scandir(store) if entry.is_dir() and "." not in entry.name]
    except OSError:
        return []
    found = [Built(store / name) for name in names if name != "cache"]
    return sorted(found, key=lambda each: each.told().get("built", float("inf")))


def recipe_of(job: Job, environ: Mapping[str, str]) -> Recipe:
    """What would be built for this job."""
    environment = job.environment
    if environment.kind == "container":
        base = environment.base or environment.image
        assert base is not None
        asked = read_requirements(job) if environment.requirements else Requirements()
        if environment.horovod:
            raise UsageError(
                f"{job.source('environment.horovod')}: Horovod is built into a venv, and this is a container",
                hint="choose a base image that has Horovod",
            )
        return Recipe("container", asked, base=base, base_state=_state_of(job, base))
    return Recipe(
        "venv",
        read_requirements(job),
        python=find_python(job, environ),
        modules=environment.modules,
        module_paths=environment.module_paths,
        system_packages=environment.system_packages,
        horovod=environment.horovod,
    )


def _state_of(job: Job, base: str) -> str:
    """An image that was replaced by another one is another base."""
    if is_remote(base):
        return ""
    path = job.folder / Path(base).expanduser()
    try:
        status = path.stat()
    except OSError:
        raise SpecError(
            f"{job.source('environment.base')}: there is no image {path}",
            hint="name a file, a folder, or an address such as docker://python:3.12",
        ) from None
    return f"{status.st_size} {status.st_mtime_ns}"


def find_python(job: Job, environ: Mapping[str, str]) -> Python:
    """The Python that builds: the one named, that of the modules, or the one that reads this."""
    environment = job.environment
    asked = environment.base_python or ("python3" if environment.modules else None)
    if asked is None:
        version = "{}.{}".format(*sys.version_info[:2])
        return Python(sys.executable, version, sys.base_prefix, platform.machine(), sys.implementation.name)
    command = str(job.folder / Path(asked).expanduser()) if os.sep in asked else asked
    variables = {**module_variables(environment, environ), **environment.variables}
    lines = [f"export {name}={quote(value)}" for name, value in variables.items()]
    lines += [*module_lines(module_section(environment)), *environment.setup]
    result = probe(
        lines,
        f"exec {quote(command)} -c {quote(_DESCRIBE)}",
        environ=submission_environment(environ, ()).variables,
    )
    try:
        details = json.loads(result.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise EnvironmentProblem(
            f"Cannot run {command}, the Python that builds the environment: {result.failure or result.last_line}",
            hint="Name another with base_python in [environment], or correct modules and setup.",
        ) from None
    return Python(command, *details[1:])


def settle(job: Job, environ: Mapping[str, str]) -> Job:
    """A job whose environment is built from requirements, with the path that this means now; others as they are."""
    environment = job.environment
    if environment.kind == "venv" and environment.path is None and environment.requirements:
        key = "path"
    elif environment.kind == "container" and environment.image is None and environment.base is not None:
        key = "image"
    else:
        return job
    meant = Built(store_of(job, environ) / recipe_of(job, environ).key)
    value = str(meant.path if key == "path" else meant.image)
    tables = job.tables.model_copy(update={"environment": environment.model_copy(update={key: value})})
    source = _SOURCE if key == "path" else "environment.base"
    return replace(job, tables=tables, sources={**job.sources, f"environment.{key}": job.source(source)})


def check_built(job: Job) -> list[Finding]:
    """A job whose environment has to be built first, and is not."""
    environment = job.environment
    if environment.kind == "current" and environment.requirements:
        text = f"{job.source('environment.requirements')} is set, and the run uses this Python all the same"
        return [Finding("environment", WARNING, text, 'set kind = "venv" in [environment]')]
    path = environment.path if environment.kind == "venv" else environment.image
    if path is None or "://" in path:
        return []
    folder = Path(path) if environment.kind == "venv" else Path(path).parent
    built = Built(folder)
    if folder.parent.name != STORE or built.is_complete:
        return []
    origin = ", ".join(environment.requirements) or environment.base
    if (builder := built.builder) is not None:
        text = f"the environment from {origin} is not built yet: {builder} is at it"
        return [Finding("environment", PROBLEM, text, "follow it: paceline env build")]
    text = f"the environment from {origin} is not built yet, or no longer what it was built from"
    return [Finding("environment", PROBLEM, text, "build it: paceline env build")]


def refuse_unbuilt(job: Job) -> None:
    """The same, for a run on this machine."""
    for each in check_built(job):
        raise EnvironmentProblem(each.text, hint=f"{each.hint} --local")


def remove(built: Built) -> None:
    """Out of the way in one step, then gone: nobody finds half of it."""
    grave = built.path.with_name(f"{built.key}.removed-{os.getpid()}")
    os.replace(built.path, grave)
    shutil.rmtree(grave, ignore_errors=True)
