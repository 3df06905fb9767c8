"""What a job knows of its surroundings: what travels with it, what must not, and how its Python is reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from paceline.errors import SpecError
from paceline.plan.environment.modules import module_variables
from paceline.plan.quote import quote
from paceline.plan.secrets import SCRIPT_NAMES, Secrets
from paceline.plan.slurm.directives import Directive
from paceline.spec import Job

# What a job may know of the shell that submitted it. All else that it needs travels in environment.sh.
_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "TZ", "KRB5CCNAME")
OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")

# What makes the current Python findable on a node, for kind = "current".
_OF_THE_CURRENT = (
    "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH",
)  # fmt: skip

# By name, from whoever submits: their values may hold a password, and stand in environment.sh alone.
PROXIES = tuple(
    spelled
    for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
    for spelled in (name, name.upper())
)

# How the submitter's shell wants wandb to behave; its key and its server's address go with the secrets.
_OF_WANDB = (
    "WANDB_MODE", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_NOTES", "WANDB_SILENT",
)  # fmt: skip

# sbatch reads these before the lines of a script: which of its options each one stands for.
SBATCH_DEFAULTS = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu", "SBATCH_ERROR": "error",
    "SBATCH_EXCLUSIVE": "exclusive", "SBATCH_EXPORT": "export", "SBATCH_GET_USER_ENV": "get-user-env",
    "SBATCH_GPUS": "gpus", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres", "SBATCH_INPUT": "input", "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu", "SBATCH_MEM_PER_GPU": "mem-per-gpu", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_OPEN_MODE": "open-mode", "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation", "SBATCH_SIGNAL": "signal", "SBATCH_TIMELIMIT": "time",
    "SBATCH_WAIT": "wait", "SBATCH_WCKEY": "wckey",
}  # fmt: skip

# Options that a default in the environment must never decide: the layout, and how a run is kept going.
_NEVER_BY_DEFAULT = {
    "array", "wait", "error", "input", "get-user-env", "gpus", "gpus-per-node", "gpus-per-task", "gres",
    "cpus-per-gpu", "mem-per-gpu", "requeue", "no-requeue",
}  # fmt: skip
# Several options that exclude each other: where ours says one, a default of another must not add to it.
_SAME = {"mem-per-cpu": "mem", "mem-per-gpu": "mem"}


@dataclass(frozen=True)
class Submission:
    """The environment that sbatch is called in, and the defaults in it that decide something."""

    variables: dict[str, str]
    deciding: dict[str, str]  # SBATCH_PARTITION -> "partition"


def submission_environment(environ: Mapping[str, str], asked: Iterable[Directive]) -> Submission:
    """What sbatch and, by it, the job see of the submitter's environment.

    Nothing that an outer job, MPI or a agent has left in it; no default that the job overrules; no secret, since
    a cluster's accounting may keep what is submitted.
    """
    ours = {each.option for each in asked}
    kept = {name: environ[name] for name in (*_EXPORTED, *OF_SLURM) if name in environ}
    deciding: dict[str, str] = {}
    for name in (name for name in environ if name.startswith("SBATCH_")):
        option = SBATCH_DEFAULTS.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-"))
        if option in _NEVER_BY_DEFAULT or option in ours or _SAME.get(option) in ours:
            continue
        deciding[name] = option
        kept[name] = environ[name]
    return Submission(kept, deciding)


def environment_file(job: Job, environ: Mapping[str, str], secrets: Secrets) -> str:
    """`environment.sh`: the variables that were asked for, secrets among them; readable by its owner alone."""
    variables: dict[str, str] = {}
    if job.environment.kind == "current":
        variables.update({name: environ[name] for name in _OF_THE_CURRENT if environ.get(name)})
    variables.update(module_variables(job.environment, environ))
    if job.environment.proxies:
        variables.update({name: environ[name] for name in PROXIES if environ.get(name)})
    variables.update({name: environ[name] for name in _OF_WANDB if environ.get(name)})
    variables.update(secrets.values)
    # The ranks have every plain variable from the order; here one must not get in the script's own way.
    variables.update({k: v for k, v in job.environment.variables.items() if k not in SCRIPT_NAMES})
    lines = [f"export {name}={quote(value)}" for name, value in variables.items()]
    return "\n".join(["# The variables of this run. Sourced by job.sbatch.", *lines]) + "\n"


def forwarded_names(job: Job, environ: Mapping[str, str], secrets: Secrets) -> list[str]:
    """Names that mpirun must carry to the other nodes (names only: values would stand in the process list)."""
    asked = [
        *secrets.values,
        *job.environment.variables,
        *(PROXIES if job.environment.proxies else ()),
        *(name for name in _OF_WANDB if environ.get(name)),
    ]
    usual = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"]
    ours = ["PYTHONPATH", "PACELINE_RUN", "PACELINE_JOB_START", "PACELINE_RENDEZVOUS", "PACELINE_TOKEN"]
    return list(dict.fromkeys([*ours, *usual, *asked]))


def environment_path(job: Job, environ: Mapping[str, str]) -> str:
    """The folder of the venv or conda environment: relative ones are the project's, conda may be given by name."""
    path = job.environment.path
    assert path is not None
    if job.environment.kind == "conda" and "/" not in path:
        if "CONDA_EXE" in environ:
            return str(PurePath(environ["CONDA_EXE"]).parent.parent / "envs" / path)
        if "MAMBA_ROOT_PREFIX" in environ:
            return str(PurePath(environ["MAMBA_ROOT_PREFIX"]) / "envs" / path)
        raise SpecError(
            f"{job.source('environment.path')} is {path!r}, a conda environment's name, but conda is not set up here",
            hint="give the environment's folder instead (`conda env list` shows it)",
        )
    if path == "~" or path.startswith("~/"):
        path = environ.get("HOME", "~") + path[1:]
    return str(job.folder / path)


def activation_lines(job: Job, environ: Mapping[str, str]) -> list[str]:
    """How the venv or conda environment becomes the one in use; nothing for the current one and containers."""
    if job.environment.kind == "venv":
        path = environment_path(job, environ)
        activate = quote(f"{path}/bin/activate")
        return [
            "# shellcheck disable=SC1091",
            f"source {activate} || fail {quote(f'there is no venv in {path}')}",
        ]
    if job.environment.kind == "conda":
        return [
            "# What `conda activate` does, without needing conda on the node.",
            f"export CONDA_PREFIX={quote(environment_path(job, environ))}",
            'export CONDA_DEFAULT_ENV="$CONDA_PREFIX"',
            'export PATH="$CONDA_PREFIX/bin:$PATH"',
            'for hook in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do',
            "    # shellcheck disable=SC1090",
            '    if [ -r "$hook" ]; then source "$hook"; fi',
            "done",
        ]
    return []


def interpreter(job: Job, environ: Mapping[str, str], current: str) -> str:
    """The Python that agents and ranks run on; `current` is the one that reads this."""
    environment = job.environment
    if environment.python is not None:
        return environment.python
    if environment.kind in ("venv", "conda"):
        return f"{environment_path(job, environ)}/bin/python"
    return "python3" if environment.kind == "container" else current
