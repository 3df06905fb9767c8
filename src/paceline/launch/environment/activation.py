"""The environment section of a batch script: variables, modules, a venv or conda environment, the user's own lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from paceline.contract import env
from paceline.contract.redaction import REDACTED, redact
from paceline.errors import SpecError
from paceline.launch.environment_file import SECRETS_MARK
from paceline.launch.secrets import Secrets, belongs_to_script
from paceline.slurm.batch_script import ModuleSection
from paceline.spec.job import Job
from paceline.spec.job_tables import Environment
from paceline.spec.shell_text import quote


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
    lines = {name: _assignment(name, value) for name, value in variables.items()}
    plain = [line for name, line in lines.items() if name not in hidden]
    # The secrets come last: stop_and_requeue.sh removes them, and all that follows the mark, when the run is over.
    marked = (
        [f"{SECRETS_MARK} {' '.join(hidden)}", *(lines[name] for name in hidden)] if hidden else []
    )
    return (
        "\n".join(["# The variables of this run, sourced by job.sbatch.", *plain, *marked]) + "\n"
    )


def _assignment(name: str, value: str) -> str:
    """Return the line that sets a variable. What Slurm has told the job about itself stays as it is."""
    line = f"export {name}={quote(value)}"
    return f'[ -n "${{{name}+set}}" ] || {line}' if name.startswith(("SLURM_", "SLURMD_")) else line


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
