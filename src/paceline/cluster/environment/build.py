"""Build an environment: write down what is wanted, and have a job or a process here do it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.environment.store import Built, Recipe, store_of
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import LIVE, WAITING
from paceline.contract.run_folder import write_atomically
from paceline.errors import ClusterError, EnvironmentProblem, UsageError
from paceline.plan.environment.build import (
    SCRIPT_NAMES,
    Build,
    BuildFolder,
    Size,
    build_directives,
    render_build,
)
from paceline.plan.environment.image import definition, image_steps, is_remote
from paceline.plan.environment.modules import module_section, module_variables
from paceline.plan.environment.requirements import name_of
from paceline.plan.environment.variables import PROXIES, submission_environment
from paceline.plan.environment.venv import venv_steps
from paceline.plan.quote import quote
from paceline.plan.redaction import redact
from paceline.spec import Job

FORGOTTEN = 24 * 3600  # seconds after which a build that is no job is over
FIRST = ("torch",)

# What a build takes along from the shell that asks for it: how pip and compilers are set up there.
_CARRIED = re.compile(
    r"PIP_(?!TARGET$|PREFIX$|USER$|ROOT$|REQUIRE_VIRTUALENV$)\w+|HOROVOD_\w+|(APPTAINER|SINGULARITY)_DOCKER_\w+"
    r"|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|CC|CXX|CUDA_HOME|TORCH_CUDA_ARCH_LIST|MAX_JOBS"
)


@dataclass(frozen=True)
class Plan:
    """What a build writes and calls. A dry run prints the script."""

    recipe: Recipe
    target: Built
    folder: BuildFolder
    files: dict[str, str]  # name -> text
    environment: str
    submitter: dict[str, str]

    @property
    def script(self) -> str:
        return self.files[self.folder.script.name]


def plan_build(job: Job, recipe: Recipe, environ: Mapping[str, str], size: Size) -> Plan:
    """The plan of a build of its own; nothing is made."""
    store = store_of(job, environ)
    target = Built(store / recipe.key)
    folder = BuildFolder(store / f"{recipe.key}.build-{secrets.token_hex(4)}")
    asked = build_directives(job, folder, size)
    files, steps = _contents(job, recipe, folder)
    build = Build(
        title=f"{recipe.kind} {recipe.key} of {job.project_name}: {recipe.origin or recipe.base}",
        folder=folder,
        target=target.path,
        cwd=job.folder,
        directives=asked,
        modules=module_section(job.environment).lines(),
        setup=job.environment.setup,
        steps=steps,
    )
    files[folder.script.name] = render_build(build)
    files[folder.marker.name] = _marker(recipe)
    submission = submission_environment(environ, asked)
    named = _named_in(recipe.requirements.lines)
    return Plan(recipe, target, folder, files, _environment(job, environ, named), submission.variables)


def _contents(job: Job, recipe: Recipe, folder: BuildFolder) -> tuple[dict[str, str], list[str]]:
    """The files that the steps read, and the steps."""
    wanted = recipe.requirements
    files = {folder.requirements.name: _text(wanted.lines)}
    if wanted.constraints:
        files[folder.constraints.name] = _text(wanted.constraints)
    if recipe.kind == "container":
        assert recipe.base is not None
        if wanted.lines:
            files[folder.definition.name] = definition(
                base=recipe.base, origin=recipe.origin, folder=folder, lines=wanted.lines,
                constraints=wanted.constraints,
            )  # fmt: skip
        engine = job.environment.engine
        return files, image_steps(
            engine=engine if engine in ("apptainer", "singularity") else "apptainer",
            base=recipe.base,
            installs=bool(wanted.lines),
        )
    assert recipe.python is not None
    # Where hashes are given, pip wants them of everything in a list: torch's own list would lack some.
    hashed = any("--hash=" in line for line in wanted.lines)
    first = [] if hashed else [line for line in wanted.lines if name_of(line) in FIRST]
    if first:
        # All of them: `--pre` decides which torch it is, `--trusted-host` whether it can be fetched.
        options = [line for line in wanted.lines if re.match(r"-(?!e|-editable)", line)]
        files[folder.first.name] = _text([*options, *first])
    return files, venv_steps(
        python=recipe.python.command,
        version=recipe.python.version,
        system_packages=recipe.system_packages,
        first=bool(first),
        constraints=bool(wanted.constraints),
        horovod=recipe.horovod,
    )


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _marker(recipe: Recipe) -> str:
    """For people, and for `paceline env list`."""
    python = recipe.python
    value = {
        "kind": recipe.kind, "key": recipe.key, "built": time.time(), "from": recipe.requirements.files,
        "python": python.version if python else None, "base": recipe.base, "modules": recipe.modules,
        "horovod": recipe.horovod, "requirements": [redact("", line) for line in recipe.requirements.lines],
    }  # fmt: skip
    return json.dumps(value, indent=1) + "\n"


def _named_in(lines: list[str]) -> set[str]:
    """Variables that pip puts into requirements: `https://${TOKEN}@git.example.org`."""
    return {name for line in lines for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line)}


def _environment(job: Job, environ: Mapping[str, str], named: set[str]) -> str:
    """The variables of a build. Addresses of indexes and proxies may hold passwords: they stand nowhere else."""
    variables = {name: text for name, text in environ.items() if _CARRIED.fullmatch(name) or name in named}
    variables |= {name: environ[name] for name in PROXIES if environ.get(name)}
    variables |= {**module_variables(job.environment, environ), **job.environment.variables}
    return "".join(
        f"export {name}={quote(text)}\n" for name, text in variables.items() if name not in SCRIPT_NAMES
    )


# -- doing it ------------------------------------------------------------------------------------------


def write_build(plan: Plan) -> None:
    """The build's folder, complete before anybody is asked to build."""
    sweep(plan.target.path.parent)
    try:
        plan.folder.path.mkdir(parents=True, mode=0o700)
        for name, text in plan.files.items():
            write_atomically(plan.folder.path / name, text)
        write_atomically(plan.folder.environment, plan.environment, mode=0o600)
    except OSError as error:
        shutil.rmtree(plan.folder.path, ignore_errors=True)
        raise EnvironmentProblem(
            f"cannot write {plan.folder.path}: {error.strerror or error}",
            hint="choose another scratch folder: [project] scratch, or PACELINE_SCRATCH",
        ) from None


def submit_build(plan: Plan) -> str:
    """Give it to Slurm; the job's id. A refusal leaves nothing behind."""
    write_build(plan)
    try:
        done = slurm.call(
            ["sbatch", "--parsable", str(plan.folder.script)], environ=plan.submitter, check=False
        )
        ids = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
        if done.returncode or not ids:
            raise ClusterError(
                f"sbatch refused the build: {slurm.error_text(done)}",
                hint="ask for other nodes (--partition, --account, --time), or build here: --local",
            )
        write_atomically(plan.folder.job, f"{ids[-1]}\n")
    except BaseException:
        shutil.rmtree(plan.folder.path, ignore_errors=True)
        raise
    job: str = ids[-1]
    return job


def start_here(plan: Plan) -> subprocess.Popen[bytes]:
    """The same script, by bash, with the same environment."""
    write_build(plan)
    with open(plan.folder.log, "wb") as log:
        return subprocess.Popen(
            ["bash", str(plan.folder.script)], env=plan.submitter, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def live_build(target: Built) -> tuple[BuildFolder, str] | None:
    """A job that is about to build the same thing, if there is one."""
    for path in sorted(target.path.parent.glob(f"{target.key}.build-*/job")):
        try:
            job = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            continue  # over since it was listed: whoever followed it has taken its folder away
        if _is_live(job):
            return BuildFolder(path.parent), job
    return None


def _is_live(job: str) -> bool:
    state = slurm.states([job]).get(job)
    return state is not None and state.phase in (LIVE, WAITING)


def is_at_it(builder: str) -> bool:
    """Whether who holds a lock ("job-12", "process-host-77") may still be building: one that was killed is not."""
    kind, _, rest = builder.partition("-")
    if kind == "job":
        try:
            return _is_live(rest)
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


def sweep(store: Path) -> None:
    """Folders of builds that are over: the last one's log has been there long enough to be read."""
    for path in store.glob("*.build-*"):
        try:
            job = (path / "job").read_text(encoding="utf-8").strip()
        except OSError:
            job = ""  # one here, or one that is just being submitted
        try:
            over = not _is_live(job) if job else time.time() - path.stat().st_mtime > FORGOTTEN
        except FileNotFoundError:
            continue
        except ClusterError:
            return
        if over:
            shutil.rmtree(path, ignore_errors=True)


def refuse_other_kinds(job: Job) -> None:
    if job.environment.kind == "conda":
        raise UsageError(
            'kind is "conda": conda builds its environments itself',
            hint="conda env create --prefix /shared/folder --file environment.yml",
        )
    if job.environment.kind == "container" and job.environment.engine == "pyxis":
        raise UsageError(
            'engine is "pyxis", which fetches images itself when a job starts',
            hint='nothing has to be built; for an image of your own use engine = "apptainer"',
        )
    image = job.environment.image
    if (
        job.environment.kind == "container"
        and job.environment.base is None
        and image
        and not is_remote(image)
    ):
        raise UsageError(
            f"{job.source('environment.image')} is {image}, a file or folder: it is used as it is",
            hint="to build one from it, write base instead of image",
        )
