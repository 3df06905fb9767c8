"""Build an environment: write the build's input, and start a job or a local process that builds."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.quote import quote
from paceline.contract.redaction import redact
from paceline.contract.run_folder import SUBMITTING, write_atomically
from paceline.errors import ClusterError, EnvironmentProblem, JobRejected, UsageError
from paceline.launch.environment.build_script import (
    SCRIPT_NAMES,
    BuildFolder,
    BuildResources,
    BuildScript,
    build_directives,
    render_build,
)
from paceline.launch.environment.container_image import definition, image_steps, is_remote
from paceline.launch.environment.modules import module_section, module_variables
from paceline.launch.environment.requirement_lines import name_of
from paceline.launch.environment.store import EnvironmentInputs, StoredEnvironment, store_path
from paceline.launch.environment.variables import PROXIES
from paceline.launch.environment.venv_script import venv_steps
from paceline.launch.run_folder import create_scratch
from paceline.slurm.job_states import squeue_and_sacct
from paceline.slurm.job_states.meanings import LIVE, WAITING
from paceline.slurm.sbatch import run_sbatch
from paceline.slurm.submission_environment import submission_environment
from paceline.spec import Job

LOCAL_BUILD_LIMIT = 24 * 3600  # seconds after which a local build counts as over
FIRST = ("torch",)  # installed before the other packages

# What a build inherits from the submitter's shell: settings of pip and of compilers.
_FORWARDED = re.compile(
    r"PIP_(?!TARGET$|PREFIX$|USER$|ROOT$|REQUIRE_VIRTUALENV$)\w+|HOROVOD_\w+|(APPTAINER|SINGULARITY)_DOCKER_\w+"
    r"|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|CC|CXX|CUDA_HOME|TORCH_CUDA_ARCH_LIST|MAX_JOBS"
)


@dataclass(frozen=True)
class BuildPlan:
    """What a build writes and calls. A dry run prints the script."""

    target: StoredEnvironment
    folder: BuildFolder
    files: dict[str, str]  # name -> text
    environment: str
    submitter: dict[str, str]

    @property
    def script(self) -> str:
        return self.files[self.folder.script.name]


def plan_build(
    job: Job, inputs: EnvironmentInputs, environ: Mapping[str, str], resources: BuildResources
) -> BuildPlan:
    """Return the plan of a new build, without creating anything."""
    store = store_path(job, environ)
    target = StoredEnvironment(store / inputs.key)
    folder = BuildFolder(store / f"{inputs.key}.build-{secrets.token_hex(4)}")
    directives = build_directives(job, folder, resources)
    files, steps = _contents(job, inputs, folder)
    build = BuildScript(
        title=f"{inputs.kind} {inputs.key} of {job.project_name}: {inputs.origin or inputs.base}",
        folder=folder,
        target=target.path,
        cwd=job.folder,
        directives=directives,
        modules=module_section(job.environment).lines(),
        setup=job.environment.setup,
        steps=steps,
    )
    files[folder.script.name] = render_build(build)
    files[folder.marker.name] = _marker(inputs)
    submission = submission_environment(environ, directives)
    named = _named_in(inputs.requirements.lines)
    return BuildPlan(target, folder, files, _environment(job, environ, named), submission.variables)


def _contents(
    job: Job, inputs: EnvironmentInputs, folder: BuildFolder
) -> tuple[dict[str, str], list[str]]:
    """Return the files that the steps read, and the steps."""
    requirements = inputs.requirements
    files = {folder.requirements.name: _text(requirements.lines)}
    if requirements.constraints:
        files[folder.constraints.name] = _text(requirements.constraints)
    if inputs.kind == "container":
        assert inputs.base is not None
        if requirements.lines:
            files[folder.definition.name] = definition(
                base=inputs.base,
                origin=inputs.origin,
                folder=folder,
                lines=requirements.lines,
                constraints=requirements.constraints,
            )
        engine = job.environment.engine
        return files, image_steps(
            engine=engine if engine in ("apptainer", "singularity") else "apptainer",
            base=inputs.base,
            installs=bool(requirements.lines),
        )
    assert inputs.python is not None
    # With hashes, pip requires one for every package in a list: torch's own list would lack some.
    hashed = any("--hash=" in line for line in requirements.lines)
    first = [] if hashed else [line for line in requirements.lines if name_of(line) in FIRST]
    if first:
        # All options: `--pre` decides which torch it is, `--trusted-host` whether pip can download it.
        options = [line for line in requirements.lines if re.match(r"-(?!e|-editable)", line)]
        files[folder.first.name] = _text([*options, *first])
    return files, venv_steps(
        python=inputs.python.command,
        version=inputs.python.version,
        system_packages=inputs.system_packages,
        first=bool(first),
        constraints=bool(requirements.constraints),
        horovod=inputs.horovod,
    )


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _marker(inputs: EnvironmentInputs) -> str:
    """Return the marker, for people and for `paceline env list`."""
    python = inputs.python
    value = {
        "kind": inputs.kind,
        "key": inputs.key,
        "built": time.time(),
        "from": inputs.requirements.files,
        "python": python.version if python else None,
        "base": inputs.base,
        "modules": inputs.modules,
        "horovod": inputs.horovod,
        "requirements": [redact("", line) for line in inputs.requirements.lines],
    }
    return json.dumps(value, indent=1) + "\n"


def _named_in(lines: list[str]) -> set[str]:
    """Return the variables that pip expands in requirements: `https://${TOKEN}@git.example.org`."""
    return {name for line in lines for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line)}


def _environment(job: Job, environ: Mapping[str, str], named: set[str]) -> str:
    """Return the variables of a build. Addresses of indexes and proxies may hold passwords: they go nowhere else."""
    variables = {
        name: text for name, text in environ.items() if _FORWARDED.fullmatch(name) or name in named
    }
    variables |= {name: environ[name] for name in PROXIES if environ.get(name)}
    variables |= {**module_variables(job.environment, environ), **job.environment.variables}
    return "".join(
        f"export {name}={quote(text)}\n"
        for name, text in variables.items()
        if name not in SCRIPT_NAMES
    )


# -- building ------------------------------------------------------------------------------------------


def write_build(plan: BuildPlan) -> None:
    """Write the build's folder, complete before the build starts."""
    remove_old_builds(plan.target.path.parent)
    try:
        create_scratch(plan.target.path.parents[2])
        plan.folder.path.mkdir(parents=True, mode=0o700)
        for name, text in plan.files.items():
            write_atomically(plan.folder.path / name, text)
        write_atomically(plan.folder.environment, plan.environment, mode=0o600)
    except OSError as error:
        shutil.rmtree(plan.folder.path, ignore_errors=True)
        raise EnvironmentProblem(
            f"Cannot write {plan.folder.path}: {error.strerror or error}.",
            hint="Choose another scratch folder with [project] scratch or PACELINE_SCRATCH.",
        ) from None


def submit_build(plan: BuildPlan) -> str:
    """Submit the build and return the job's id. A rejected build leaves nothing behind."""
    write_build(plan)
    try:
        try:
            argv = ["sbatch", "--parsable", str(plan.folder.script)]
            job = run_sbatch(argv, plan.submitter, folder=plan.folder.path)
        except JobRejected as rejected:
            raise ClusterError(
                f"sbatch rejected the build: {rejected.reason}.",
                hint="Ask for other nodes (--partition, --account, --time), or build here with --local.",
            ) from None
        write_atomically(plan.folder.job, f"{job}\n")
    except BaseException:
        # otherwise there may be a job, which needs it
        if not (plan.folder.path / SUBMITTING).exists():
            shutil.rmtree(plan.folder.path, ignore_errors=True)
        raise
    return job


def start_local_build(plan: BuildPlan) -> subprocess.Popen[bytes]:
    """Run the same script with bash, in the same environment."""
    write_build(plan)
    with open(plan.folder.log, "wb") as log:
        return subprocess.Popen(
            ["bash", str(plan.folder.script)],
            env=plan.submitter,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def find_live_build(target: StoredEnvironment) -> tuple[BuildFolder, str] | None:
    """Return a job that builds the same environment, if there is one."""
    jobs = _jobs(target.path.parent.glob(f"{target.key}.build-*"))
    live = _find_live(jobs.values())
    return next(((BuildFolder(path), job) for path, job in jobs.items() if job in live), None)


def _jobs(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the jobs of the builds that are submitted."""
    found = {}
    for path in sorted(folders):
        # a local build, one that is just being submitted, or one that was just removed
        with suppress(OSError):
            found[path] = (path / "job").read_text(encoding="utf-8").strip()
    return {path: job for path, job in found.items() if job}


def _find_live(jobs: Iterable[str]) -> set[str]:
    """Return which of these jobs wait or run, with one question."""
    return {
        job
        for job, state in squeue_and_sacct.states(jobs).items()
        if state.phase in (LIVE, WAITING)
    }


def may_be_building(builder: str) -> bool:
    """Return whether the holder of a lock ("job-12", "process-host-77") may still be building."""
    kind, _, rest = builder.partition("-")
    if kind == "job":
        try:
            return bool(_find_live([rest]))
        except ClusterError:
            return True
    host, _, process = rest.rpartition("-")
    if host != socket.gethostname() or not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def remove_old_builds(store: Path) -> None:
    """Remove the folders of builds that are over: their logs were there long enough to be read."""
    folders = list(store.glob("*.build-*"))
    jobs = _jobs(folders)
    try:
        live = _find_live(jobs.values())
    except ClusterError:
        return
    for path in folders:
        try:
            young = time.time() - path.stat().st_mtime <= LOCAL_BUILD_LIMIT
        except FileNotFoundError:
            continue
        if jobs[path] not in live if path in jobs else not young:
            shutil.rmtree(path, ignore_errors=True)


def require_buildable(job: Job) -> None:
    """Raise for environments that `paceline env build` does not build."""
    if job.environment.kind == "conda":
        raise UsageError(
            'kind is "conda", but conda builds its environments itself.',
            hint="Use conda env create --prefix /shared/folder --file environment.yml.",
        )
    if job.environment.kind == "container" and job.environment.engine == "pyxis":
        raise UsageError(
            'engine is "pyxis", which fetches images itself when a job starts.',
            hint='You need not build anything; for an image of your own, use engine = "apptainer".',
        )
    image = job.environment.image
    if (
        job.environment.kind == "container"
        and job.environment.base is None
        and image
        and not is_remote(image)
    ):
        raise UsageError(
            f"{job.source('environment.image')} is {image}, a file or folder that is used as it is.",
            hint="To build an image from it, set base instead of image.",
        )
