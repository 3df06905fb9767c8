"""The store of built environments: where they are, how they are identified, and which one a job uses.

`<scratch>/<project>/.environments/<key>`: the key is a hash of the build's inputs. Equal inputs share an environment,
changed ones get another, and a job in the queue keeps the one that it was submitted with.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_object
from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.environment.activation import module_section, module_variables
from paceline.launch.environment.build_script import IMAGE, MARKER, is_remote
from paceline.launch.environment.probe import probe
from paceline.launch.environment.requirements import Requirements, read_requirements
from paceline.launch.run_folder import resolve_scratch
from paceline.slurm.submission_environment import submission_environment
from paceline.spec.findings import PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.shell_text import quote
from paceline.spec.user_files import expand_home

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

    def record(self) -> dict[str, Any]:
        return read_object(self.path / MARKER)


def store_path(job: Job, environ: Mapping[str, str]) -> Path:
    return resolve_scratch(job, environ) / job.project_name / STORE


def list_environments(store: Path) -> list[StoredEnvironment]:
    """Return all environments of a store, oldest first."""
    found = [StoredEnvironment(marker.parent) for marker in store.glob(f"*/{MARKER}")]
    return sorted(found, key=lambda each: each.record()["built"])


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
