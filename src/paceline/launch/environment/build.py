"""Build an environment: write the build's input, and start a job or a local process that builds."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline.contract.redaction import redact
from paceline.contract.run_folder import write_atomically
from paceline.errors import ClusterError, EnvironmentProblem, JobRejected, UsageError
from paceline.launch.environment.activation import PROXIES, module_section, module_variables
from paceline.launch.environment.build_script import (
    SCRIPT_NAMES,
    BuildFolder,
    BuildResources,
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
from paceline.slurm.sbatch import run_sbatch, submission_environment
from paceline.spec.job import Job
from paceline.spec.shell_text import cluster, quote, to_type

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
    requirements, base, python = inputs.requirements, inputs.base, inputs.python
    files = {
        folder.requirements.name: _text(requirements.lines),
        folder.constraints.name: _text(requirements.constraints),
        folder.marker.name: _marker(inputs),
    }
    if base is not None:
        if requirements.lines:
            files[folder.definition.name] = definition(
                base=base,
                origin=inputs.origin,
                lines=requirements.lines,
                constraints=requirements.constraints,
            )
        engine = job.environment.engine
        steps = image_steps(engine=engine, base=base, installs=bool(requirements.lines))
    else:
        assert python is not None, "a venv has one"
        if first := _torch_lines(requirements.lines):
            files[folder.first.name] = _text(first)
        steps = venv_steps(
            python=python.command,
            version=python.version,
            lines=requirements.lines,
            system_packages=inputs.system_packages,
            first=bool(first),
            horovod=inputs.horovod,
        )
    script = render_build(
        title=f"{inputs.kind} {inputs.key} of {job.project_name}: {inputs.origin or inputs.base}",
        folder=folder,
        link=target.path,
        cwd=job.folder,
        directives=directives,
        modules=module_section(job.environment).lines(),
        setup=job.environment.setup,
        steps=steps,
    )
    files[folder.script.name] = script
    submitter = submission_environment(environ, directives).variables
    variables = _variables(job, environ, requirements.lines)
    environment = "".join(f"export {name}={quote(text)}\n" for name, text in variables.items())
    return BuildPlan(target, folder, files, environment, submitter)


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _torch_lines(lines: list[str]) -> list[str]:
    """Return the requirements for torch, with all options: `--pre` decides which torch it is."""
    torch = [line for line in lines if re.match(r"torch(?![\w.-])", line, re.IGNORECASE)]
    # With hashes, pip requires one for every package in a list: this one would lack some.
    if not torch or any("--hash=" in line for line in lines):
        return []
    return [*(line for line in lines if re.match(r"-(?!e|-editable)", line)), *torch]


def _marker(inputs: EnvironmentInputs) -> str:
    """Return the marker: what the environment was built from."""
    value = {
        "kind": inputs.kind,
        "key": inputs.key,
        "built": time.time(),
        "from": inputs.requirements.files,
        "python": inputs.python.version if inputs.python else None,
        "base": inputs.base,
        "modules": inputs.modules,
        "horovod": inputs.horovod,
        "requirements": [redact("", line) for line in inputs.requirements.lines],
    }
    return json.dumps(value, indent=1) + "\n"


def _variables(job: Job, environ: Mapping[str, str], lines: list[str]) -> dict[str, str]:
    """Return the variables of a build. Addresses of indexes and proxies may hold passwords: they go nowhere else."""
    # pip expands them in requirements: `https://${TOKEN}@git.example.org`
    named = set(re.findall(r"\$\{([A-Z0-9_]+)\}", "\n".join(lines)))
    variables = {
        name: text
        for name, text in environ.items()
        if text and (name in named or name in PROXIES or _FORWARDED.fullmatch(name))
    }
    variables |= {**module_variables(job.environment, environ), **job.environment.variables}
    return {name: text for name, text in variables.items() if name not in SCRIPT_NAMES}


# -- building ------------------------------------------------------------------------------------------


def write_build(plan: BuildPlan) -> None:
    """Write the build's folder, complete before the build starts."""
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
    argv = ["sbatch", "--parsable", str(plan.folder.script)]
    try:
        job = run_sbatch(argv, plan.submitter, folder=plan.folder.path)
    except JobRejected as rejected:
        shutil.rmtree(plan.folder.path, ignore_errors=True)
        raise ClusterError(
            f"sbatch rejected the build: {rejected.reason}.",
            hint="Ask for other nodes (--partition, --account, --time), or build here with --local.",
        ) from None
    write_atomically(plan.folder.job, f"{job}\n")
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


def require_buildable(job: Job) -> None:
    """Raise for environments that `paceline env build` does not build."""
    environment = job.environment
    if environment.kind == "conda":
        raise UsageError(
            'kind is "conda", but conda builds its environments itself.',
            hint="Use conda env create --prefix /shared/folder --file environment.yml.",
        )
    if environment.kind != "container":
        return
    if environment.engine == "pyxis":
        raise UsageError(
            'engine is "pyxis", which fetches images itself when a job starts.',
            hint='You need not build anything; for an image of your own, use engine = "apptainer".',
        )
    if environment.image and environment.base is None and not is_remote(environment.image):
        raise UsageError(
            f"{job.source('environment.image')} is {environment.image}, a file or folder that is used as it is.",
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
            self.state = "over"
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
        position, over = 0, False
        while not over:
            over = self.is_over()  # before reading: what was written by then is still read
            text = self._read_log()
            end = len(text) if over else text.rfind("\n") + 1
            yield from text[position:end].splitlines()
            position = end
            if not over:
                yield None
                time.sleep(POLL_INTERVAL)

    def progress(self) -> str:
        return f"job {self.job} is {self.state}" if self.job else "building"

    def _read_log(self) -> str:
        if not self.folder.log.exists():
            return ""
        # container engines write in colours
        text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def errors(self, max_lines: int = 12) -> list[str]:
        """Return pip's errors from the log if there are any, else its last lines."""
        lines = self._read_log().splitlines()
        errors = [
            line.strip() for line in lines if re.match(r"\s*(?:(?:ERROR|error|FATAL)\b|×|╰)", line)
        ]
        ours = [line for line in lines if line.startswith("paceline: ")][-1:]
        return [*errors[-max_lines:], *ours] or lines[-max_lines:]

    def check_result(self, *, is_shown: bool = False) -> None:
        """Raise if the build failed. `is_shown`: its log is above the error already."""
        deadline = time.monotonic() + FILE_TIMEOUT
        while not (self.target.is_complete or self._has_failed()) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        if self.target.is_complete:
            return
        builder = f"Job {self.job}" if self.job else "The build"
        ended = "" if self.process or self.state in ("over", "failed") else f" ({self.state})"
        where = f" on {name}" if (name := cluster()) else ""
        raise EnvironmentProblem(
            "\n  ".join(
                [
                    f"{builder}{ended} failed: nothing was built.",
                    *([] if is_shown else self.errors()),
                ]
            ),
            hint=f"{self._advise()}The full log is in {self.folder.log}{where}.",
        )

    def _has_failed(self) -> bool:
        if self.process is not None:
            return self.process.returncode != 0
        return self.state not in ("over", "done") or "paceline: error" in self._read_log()

    def _advise(self) -> str:
        """Return what to do if packages cannot be downloaded; empty if something else is wrong."""
        if not NO_NETWORK.search(self._read_log()):
            return ""
        where = "The node" if self.job else "This machine"
        return (
            f"{where} cannot reach the package index: compute nodes often have no internet access. Build on the login"
            f" node instead:\n    {to_type('env build --local')}\n  If there is a proxy or a mirror, set https_proxy or"
            " PIP_INDEX_URL in variables of [environment].\n  "
        )
