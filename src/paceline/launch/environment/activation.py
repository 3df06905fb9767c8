"""The environment section of a batch script: variables, modules, a venv or conda environment, the user's own lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from paceline.contract import env
from paceline.contract.environment_file import SECRETS_MARK
from paceline.contract.redaction import REDACTED, redact
from paceline.errors import SpecError
from paceline.launch.secrets import Secrets, belongs_to_script
from paceline.slurm.batch_script import ContainerEntry, ModuleSection
from paceline.spec.job import Job
from paceline.spec.job_tables import Environment
from paceline.spec.run_path import RunPath
from paceline.spec.shell_text import command_line, quote


def environment_path(job: Job, environ: Mapping[str, str]) -> str:
    """Return the folder of the venv or conda environment. Relative ones are the project's; conda takes a name too."""
    path = job.environment.path
    assert path is not None
    if job.environment.kind == "conda" and "/" not in path:
        if "CONDA_EXE" in environ:
            return str(PurePath(environ["CONDA_EXE"]).parent.parent / "envs" / path)
        if "MAMBA_ROOT_PREFIX" in environ:
            return str(PurePath(environ["MAMBA_ROOT_PREFIX"]) / "envs" / path)
        raise SpecError(
            f"{job.source('environment.path')} is {path!r}, a conda environment's name, but conda is not set up here.",
            hint="Give the environment's folder instead; `conda env list` shows it.",
        )
    if path == "~" or path.startswith("~/"):
        path = environ.get("HOME", "~") + path[1:]
    return str(job.folder / path)


def activation_lines(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return the lines that activate the venv or conda environment; none for the current Python and containers."""
    if job.environment.kind == "venv":
        path = environment_path(job, environ)
        activate = quote(f"{path}/bin/activate")
        return [f"source {activate} || paceline_fail {quote(f'There is no venv in {path}.')}"]
    if job.environment.kind == "conda":
        return [
            "# What `conda activate` does, without conda on the node.",
            f"export CONDA_PREFIX={quote(environment_path(job, environ))}",
            'export CONDA_DEFAULT_ENV="$CONDA_PREFIX"',
            'export PATH="$CONDA_PREFIX/bin:$PATH"',
            'for hook in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do',
            '    if [ -r "$hook" ]; then source "$hook"; fi',
            "done",
        ]
    return []


def interpreter(job: Job, environ: Mapping[str, str], current: str) -> str:
    """Return the Python that agents and ranks run on; `current` is the one that runs this."""
    environment = job.environment
    if environment.python is not None:
        return environment.python
    if environment.kind in ("venv", "conda"):
        return f"{environment_path(job, environ)}/bin/python"
    return "python3" if environment.kind == "container" else current


# Where `module` and its files are. Sites differ, and a batch shell reads no profile.
_LOCATIONS = ("MODULEPATH", "MODULESHOME", "LMOD_PKG", "LMOD_CMD", "LMOD_DIR", "LMOD_ROOT")

# What is loaded: without these the job could not unload what is still in the submitter's PATH.
_LOADED = re.compile(
    r"LOADEDMODULES|_LMFILES_|_ModuleTable\d+_|_ModuleTable_Sz_|__LMOD_REF_COUNT_\w+|LMOD_FAMILY_\w+|__MODULES_\w+"
)

_COMMAND = r"""# `module` is a shell function of the login shell; a batch shell has to define it first.
if ! command -v module >/dev/null; then
    for init in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
        /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
        if [ -r "$init" ]; then source "$init"; break; fi
    done
fi
command -v module >/dev/null || paceline_fail "The job uses modules, but there is no 'module' command on $HOSTNAME."
"""


def purges(environment: Environment) -> bool:
    """A job that names its modules gets only those, unless it asks for more."""
    return bool(environment.modules) if environment.purge is None else environment.purge


def uses_modules(environment: Environment) -> bool:
    return bool(environment.modules or environment.module_paths or environment.purge)


def module_section(environment: Environment) -> ModuleSection:
    """Return `module purge`, `module use` and `module load`, where the job asks for them."""
    if not uses_modules(environment):
        return ModuleSection()
    purge = ["module purge"] if purges(environment) else []
    use = [f"module use {quote(path)}" for path in environment.module_paths]
    return ModuleSection(_COMMAND.splitlines(), [*purge, *use], environment.modules)


def module_variables(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a job must know about the submitter's modules: where they are, and what there is to purge."""
    if not uses_modules(environment) and environment.kind != "current":
        return {}
    # If nothing is purged, and the variables of loaded modules stay behind, the job must not take them for loaded.
    loaded = environment.kind == "current" or purges(environment)
    return {
        name: text
        for name, text in environ.items()
        if text and (name in _LOCATIONS or (loaded and _LOADED.fullmatch(name)))
    }


# What a node needs to find the current Python, for kind = "current".
_CURRENT_PYTHON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "CUDA_HOME",
    "CUDA_PATH",
    "ROCM_PATH",
)

# Forwarded by name: their values may hold a password, and are written to environment.sh alone.
PROXIES = tuple(
    spelling
    for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
)

# The submitter's settings of wandb; its key and its server's address go with the secrets.
_WANDB = (
    "WANDB_MODE",
    "WANDB_ENTITY",
    "WANDB_PROJECT",
    "WANDB_RUN_GROUP",
    "WANDB_TAGS",
    "WANDB_NOTES",
    "WANDB_SILENT",
)


def environment_file(job: Job, environ: Mapping[str, str], secrets: Secrets) -> str:
    """Return `environment.sh`: the job's variables, secrets among them, in a file that only its owner can read."""
    variables: dict[str, str] = {}
    if job.environment.kind == "current":
        variables.update({name: environ[name] for name in _CURRENT_PYTHON if environ.get(name)})
    variables.update(module_variables(job.environment, environ))
    if job.environment.proxies:
        variables.update({name: environ[name] for name in PROXIES if environ.get(name)})
    variables.update({name: environ[name] for name in _WANDB if environ.get(name)})
    variables.update(secrets.values)
    # The ranks get every plain variable from the launch spec; here they must not overwrite the script's own.
    variables.update(
        {k: v for k, v in job.environment.variables.items() if not belongs_to_script(k)}
    )
    hidden = [
        name
        for name, value in variables.items()
        if name in secrets.values or redact(name, value) == REDACTED
    ]
    lines = {name: f"export {name}={quote(value)}" for name, value in variables.items()}
    for name, line in lines.items():  # what Slurm has told the job about itself stays as it is
        if name.startswith(("SLURM_", "SLURMD_")):
            lines[name] = f'[ -n "${{{name}+set}}" ] || {line}'
    plain = [line for name, line in lines.items() if name not in hidden]
    # The secrets come last: stop_and_requeue.sh removes them, and all that follows the mark, when the run is over.
    marked = (
        [f"{SECRETS_MARK} {' '.join(hidden)}", *(lines[name] for name in hidden)] if hidden else []
    )
    return (
        "\n".join(["# The variables of this run, sourced by job.sbatch.", *plain, *marked]) + "\n"
    )


def forwarded_names(job: Job, environ: Mapping[str, str], secrets: Secrets) -> list[str]:
    """Return the variables that mpirun takes to the other nodes, by name: values would show in the process list."""
    requested = [
        *secrets.values,
        *job.environment.variables,
        *(PROXIES if job.environment.proxies else ()),
        *(name for name in _WANDB if environ.get(name)),
    ]
    paths = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"]
    ours = ["PYTHONPATH", env.RUN, env.JOB_START, env.RENDEZVOUS, env.TOKEN]
    return list(dict.fromkeys([*ours, *paths, *requested]))


# -- trying it here

# seconds: module systems on a busy file system take their time, and so does a first import
TIMEOUT = 120.0


@dataclass(frozen=True)
class ProbeResult:
    """How a probe ended. `code` is None if it took too long; `failure` is what the script's own `fail` was given."""

    code: int | None
    out: str
    err: str
    failure: str | None = None

    @property
    def last_line(self) -> str:
        lines = self.err.strip().splitlines()
        return lines[-1].strip()[-300:] if lines else f"exit code {self.code}"


def probe(
    lines: Sequence[str], command: str, *args: str, environ: Mapping[str, str]
) -> ProbeResult:
    """Have bash run the lines, then a command, in an empty folder and just this environment; nothing stays behind.

    The command may use "$@", which are `args`. The lines may have secrets: the folder is ours alone.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        # the job starts in its run folder, where none of the project's files are
        script, out, err, report, cwd = (
            Path(folder, name) for name in ("script", "out", "err", "report", "cwd")
        )
        cwd.mkdir()
        head = [
            f"export {env.CHECK}=1",
            f'paceline_fail() {{ echo "$*" >{quote(str(report))}; exit 1; }}',
        ]
        script.write_text("\n".join([*head, *lines, command]), "utf-8", "surrogateescape")
        # Files, not pipes: a line of `setup` may leave something in the background that holds them open.
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = subprocess.Popen(
                ["bash", str(script), *args],
                env=environ,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            code = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(TIMEOUT)
            finally:  # also after Ctrl-C, which does not reach a session of its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed, errors = (path.read_text("utf-8", "replace") for path in (out, err))
        failure = report.read_text("utf-8", "replace").strip() if report.exists() else None
        return ProbeResult(code, printed, errors, failure)


FUNCTION = "paceline_inside"  # `paceline_inside COMMAND...` runs a command in the container
NO_ENGINE = 96  # its exit code where there is no engine


def container_entry(job: Job, run_path: RunPath, *, gpus: int) -> ContainerEntry:
    """Return how this job's commands enter its container; nothing for jobs without one."""
    environment = job.environment
    if environment.kind != "container":
        return ContainerEntry()
    shared = _shared_folders(job, run_path)
    for path in shared:
        if re.search("[:,]", path):
            raise SpecError(
                f"The container needs {path}, but container engines read a colon or a comma in a path as a separator.",
                hint="Move it to a path without them.",
            )
    if environment.engine == "pyxis":
        return ContainerEntry(srun_options=_pyxis_options(job, shared))
    # stop_and_requeue.sh writes `paceline_inside` to this file, where every node finds it.
    return ContainerEntry(
        prefix=["bash", '"$paceline_run/job-starts/$paceline_job_start/inside.sh"'],
        definition=_definition(job, run_path, shared, gpus=gpus),
    )


def image_path(job: Job) -> str:
    """Return the image: a relative file is the project's; one that is fetched is left as it is."""
    image = job.environment.image
    assert image is not None, "the spec requires one"
    if is_fetched(job):
        return image
    return str(job.folder / image)


def is_fetched(job: Job) -> bool:
    """Return whether the image is named by its source, not by a file."""
    image = job.environment.image or ""
    is_file = image.startswith(("/", "./")) or image.endswith((".sqsh", ".squashfs"))
    return "://" in image or (job.environment.engine == "pyxis" and not is_file)


def _shared_folders(job: Job, run_path: RunPath) -> list[str]:
    """Return the folders that the container needs at the same paths: runs, code, the project, data to be staged."""
    data = [path for path in job.tables.data.stage if path.startswith("/")]
    wanted = dict.fromkeys(
        [str(run_path.scratch / run_path.project), str(job.folder), str(job.cwd), *data]
    )
    return [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]


def _binds(job: Job) -> list[str]:
    """Return what the user adds: "outside:inside", or one path for both."""
    start = job.runtime.start_from
    binds = [*job.environment.binds, *([start] if start and start.startswith("/") else [])]
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in binds]


def _pyxis_options(job: Job, shared: list[str]) -> list[str]:
    if job.launch.style == "mpirun":
        raise SpecError(
            f'{job.source("environment.engine")} is "pyxis", which is part of srun, but '
            f'{job.source("launch.style")} is "mpirun".',
            hint='Use another style, or engine = "apptainer".',
        )
    mounts = ",".join([*(f"{path}:{path}" for path in shared), *_binds(job)])
    options = [
        f"--container-image={image_path(job)}",
        f"--container-mounts={mounts}",
        *job.environment.engine_options,
    ]
    return [quote(option) for option in options]


def engines(engine: str) -> list[str]:
    """Apptainer and Singularity are one program under two names: look first for the one that was named."""
    return list(dict.fromkeys([engine, "apptainer", "singularity"]))


def _definition(job: Job, run_path: RunPath, shared: list[str], *, gpus: int) -> list[str]:
    """Return the function as lines of bash."""
    found = " || ".join(f"type -P {engine}" for engine in engines(job.environment.engine))
    data_folder = job.tables.data.folder
    fixed = [
        *job.environment.engine_options,
        *(arg for bind in _binds(job) for arg in ("--bind", bind)),
    ]
    return [
        "# How a node enters the container: it uses the engine and the GPUs that it has, and mounts those of the job's",
        "# folders that exist on it.",
        "# shellcheck disable=SC2317 # the nodes call it",
        f"{FUNCTION}() {{",
        "    local paceline_engine paceline_options=() paceline_folder",
        f"    paceline_engine=$({found}) || {{",
        '        echo "paceline: error: There is neither apptainer nor singularity on $HOSTNAME." >&2',
        f"        exit {NO_ENGINE}",
        "    }",
        *(_GPUS if gpus else []),
        *(_data_folder_lines(data_folder) if data_folder else []),
        "    for paceline_folder in \\",
        *(f"        {quote(path)} \\" for path in shared),
        *(['        "$paceline_folder" \\'] if data_folder else []),
        '        "${SLURM_TMPDIR:-}" "${TMPDIR:-}"; do',
        '        [ -d "$paceline_folder" ] && paceline_options+=(--bind "$paceline_folder:$paceline_folder")',
        "    done",
        "    export PYTHONNOUSERSITE=1 # use the image's packages, not those in the home folder",
        "    # Keep the engine from creating a folder in the home folder.",
        '    [ -e ~/.apptainer ] || export APPTAINER_CONFIGDIR="${PACELINE_RUN:-$HOME/.cache}/.apptainer-$UID"',
        *(_cache_lines(run_path) if is_fetched(job) else []),
        f'    exec "$paceline_engine" exec "${{paceline_options[@]}}" {command_line([*fixed, image_path(job)])} "$@"',
        "}",
    ]


_GPUS = [
    "    [ -e /dev/nvidiactl ] && paceline_options+=(--nv)",
    "    [ -e /dev/kfd ] && paceline_options+=(--rocm)",
]


def _data_folder_lines(folder: str) -> list[str]:
    """`[data] folder` may name variables of the node. If it does not exist yet, bind the nearest folder above it."""
    text = ""
    for part in re.split(r"(\$\{\w+\}|\$\w+)", re.sub(r"^~(?=/|$)", "$HOME", folder)):
        name = part.strip("${}")
        is_variable = part.startswith("$") and name.isidentifier()
        text += f'"${{{name}:?}}"' if is_variable else quote(part) if part else ""
    return [
        f"    paceline_folder={text}",
        '    until [ -d "$paceline_folder" ] || [ "$paceline_folder" = "${paceline_folder%/*}" ]; do',
        "        paceline_folder=${paceline_folder%/*}",
        "    done",
    ]


def _cache_lines(run_path: RunPath) -> list[str]:
    """Keep what the engine fetches out of the home folder, which is small."""
    return [
        f'    [ -n "${{APPTAINER_CACHEDIR:-}}" ] || APPTAINER_CACHEDIR={quote(str(run_path.scratch / ".containers"))}',
        '    export APPTAINER_CACHEDIR SINGULARITY_CACHEDIR="$APPTAINER_CACHEDIR"',
        '    mkdir -p "$APPTAINER_CACHEDIR"',
    ]
