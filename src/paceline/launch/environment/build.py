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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.redaction import redact
from paceline.contract.run_folder import SUBMITTING, write_atomically
from paceline.errors import ClusterError, EnvironmentProblem, JobRejected, UsageError
from paceline.launch.environment.activation import PROXIES, module_section, module_variables
from paceline.launch.environment.build_script import (
    SCRIPT_NAMES,
    BuildFolder,
    BuildResources,
    BuildScript,
    build_directives,
    definition,
    image_steps,
    is_remote,
    render_build,
    venv_steps,
)
from paceline.launch.environment.store import EnvironmentInputs, StoredEnvironment, store_path
from paceline.launch.run_folder import create_scratch
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import LIVE, WAITING, JobState
from paceline.slurm.sbatch import run_sbatch
from paceline.slurm.submission_environment import submission_environment
from paceline.spec.job import Job
from paceline.spec.shell_text import cluster, quote, to_type

OLD_BUILD = 7 * 86400  # seconds after which a build counts as over
FIRST = re.compile(r"torch(?![\w.-])", re.IGNORECASE)  # installed before the other packages

# What a build inherits from the submitter's shell: settings of pip and of compilers.
_FORWARDED = re.compile(
    r"PIP_(?!TARGET$|PREFIX$|USER$|ROOT$|REQUIRE_VIRTUALENV$)\w+|UV_\w+|HOROVOD_\w+|(APPTAINER|SINGULARITY)_DOCKER_\w+"
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
    first = [] if hashed else [line for line in requirements.lines if FIRST.match(line)]
    if first:
        # All options: `--pre` decides which torch it is, `--trusted-host` whether pip can download it.
        options = [line for line in requirements.lines if re.match(r"-(?!e|-editable)", line)]
        files[folder.first.name] = _text([*options, *first])
    return files, venv_steps(
        python=inputs.python.command,
        version=inputs.python.version,
        lines=requirements.lines,
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
    jobs: dict[str, Path] = {}
    for path in sorted(target.path.parent.glob(f"{target.key}.build-*")):
        with suppress(OSError):  # a local build, or one that is just being submitted
            jobs[(path / "job").read_text(encoding="utf-8").strip()] = path
    job = next(iter(_find_live(jobs)), None)
    return (BuildFolder(jobs[job]), job) if job is not None else None


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
    """Remove the folders of builds that are long over: their logs were there to be read."""
    for path in store.glob("*.build-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_BUILD:
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


POLL_INTERVAL = 0.3  # seconds between reads of the log
FILE_TIMEOUT = 30.0  # seconds that a shared file system may take to show what a node has written
STATE_INTERVAL = 2.0  # seconds between looks at the state of the job

NO_NETWORK = re.compile(  # in the words of pip, curl, git and container engines
    r"name resolution|name or service not known|nodename nor servname|could not resolve|no such host"
    r"|network is unreachable|no route to host|failed to establish a new connection|connection (?:timed out|refused)"
    r"|connect ?timeout|cannot connect to proxy|i/o timeout",
    re.IGNORECASE,
)

QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]


class BuildProgress:
    """A running build: what it prints, and how far it is."""

    def __init__(
        self,
        target: StoredEnvironment,
        folder: BuildFolder,
        *,
        job: str = "",
        process: subprocess.Popen[bytes] | None = None,
        query: QueryStates = squeue_and_sacct.states,
    ) -> None:
        self.target = target
        self.folder = folder
        self.job = job
        self.process = process
        self.query = query  # how to find out the state of the job while it builds
        self.state = "starting"
        self._next = 0.0

    def is_over(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        if not self.folder.environment.exists():  # the script removes it when it ends
            has_failed = any(line.startswith("paceline: error") for line in self._read_log())
            self.state = "failed" if has_failed else "done"
            return True
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + STATE_INTERVAL
        try:
            found = self.query([self.job]).get(self.job)
        except ClusterError:
            # the scheduler does not respond for a moment: the build may still be running
            return False
        self.state = found.label if found is not None else "gone"
        return found is None or found.phase not in (LIVE, WAITING)

    def lines(self) -> Iterator[str | None]:
        """Yield the log's lines as they come; None in between, so that a progress line can move."""
        position, rest = 0, b""
        while True:
            over = self.is_over()  # before reading: what was written by then is still read
            try:
                with open(self.folder.log, "rb") as log:
                    log.seek(position)
                    piece = log.read()
            except OSError:
                piece = b""
            position += len(piece)
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            if over:
                if rest:
                    yield rest.decode(errors="replace")
                return
            yield None
            time.sleep(POLL_INTERVAL)

    def progress(self) -> str:
        """Return how many packages are installed so far."""
        if self.process is None and self.state != "running":
            return f"job {self.job} is {self.state}"
        packages = self.target.path.glob("lib/python*/site-packages/*.dist-info")
        return f"building: {sum(1 for _ in packages)} packages installed"

    def _succeeded(self) -> bool:
        return self.process.returncode == 0 if self.process is not None else self.state == "done"

    def errors(self, max_lines: int = 12) -> list[str]:
        """Return pip's errors from the log if there are any, else its last lines."""
        lines = self._read_log()
        errors = [
            line.strip() for line in lines if re.match(r"\s*(?:(?:ERROR|error|FATAL)\b|×|╰)", line)
        ]
        ours = [line for line in lines if line.startswith("paceline: ")][-1:]
        return [*errors[-max_lines:], *ours] or lines[-max_lines:]

    def _read_log(self) -> list[str]:
        try:
            text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        # container engines write in colours
        return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()

    def check_result(self, *, is_shown: bool = False) -> None:
        """Raise if the build failed. `is_shown`: its log is above the error already."""
        deadline = time.monotonic() + FILE_TIMEOUT
        while self._succeeded() and not self.target.is_complete and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        if self.target.is_complete:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return
        builder = (
            f"Job {self.job}{'' if self.state == 'failed' else f' ({self.state})'}"
            if self.job
            else "The build"
        )
        where = f" on {name}" if (name := cluster()) else ""
        raise EnvironmentProblem(
            "\n  ".join(
                [f"{builder} failed: nothing was built.", *([] if is_shown else self.errors())]
            ),
            hint=f"{self._advise()}The full log is in {self.folder.log}{where}.",
        )

    def _advise(self) -> str:
        """Return what to do if packages cannot be downloaded; empty if something else is wrong."""
        if not any(NO_NETWORK.search(line) for line in self._read_log()):
            return ""
        settings = "https_proxy, or PIP_INDEX_URL of a mirror, in variables of [environment]"
        if self.process is not None:
            return f"This machine cannot reach the package index. If it needs a proxy, set {settings}.\n  "
        here = "on the login node" if cluster() else "here"
        return (
            f"The node cannot reach the package index: compute nodes often have no internet access. Build {here}"
            f" instead:\n    {to_type('env build --local')}\n  If nodes have a proxy or a mirror, set {settings}.\n  "
        )
