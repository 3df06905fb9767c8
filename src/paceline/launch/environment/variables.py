"""Which variables of the submitter travel with a job, and which must not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.contract import env
from paceline.contract.files.environment_file import SECRETS_MARK
from paceline.contract.quote import quote
from paceline.contract.redaction import REDACTED, redact
from paceline.launch.environment.modules import module_variables
from paceline.launch.secrets.declared import Secrets, belongs_to_script
from paceline.slurm.sbatch_directives import Directive
from paceline.spec import Job

# What a job inherits from the shell that submits it. Everything else that it needs travels in environment.sh.
_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "TZ", "KRB5CCNAME")
SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")

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

# sbatch reads these before the lines of a script: the option that each one sets.
SBATCH_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_ERROR": "error",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GET_USER_ENV": "get-user-env",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_INPUT": "input",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WAIT": "wait",
    "SBATCH_WCKEY": "wckey",
}

# Options that a default in the environment must never set: counts of tasks and GPUs, and how a run is requeued.
_NEVER_BY_DEFAULT = {
    "array",
    "wait",
    "error",
    "input",
    "get-user-env",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "cpus-per-gpu",
    "mem-per-gpu",
    "requeue",
    "no-requeue",
}
# Options that exclude each other: where ours sets one, a default must not set the other.
_SAME = {"mem-per-cpu": "mem", "mem-per-gpu": "mem"}


@dataclass(frozen=True)
class SubmissionEnvironment:
    """The environment that sbatch is called in, and the defaults in it that set an option."""

    variables: dict[str, str]
    defaults: dict[str, str]  # SBATCH_PARTITION -> "partition"


def submission_environment(
    environ: Mapping[str, str], directives: Iterable[Directive]
) -> SubmissionEnvironment:
    """Return what sbatch, and through it the job, sees of the submitter's environment.

    Nothing that an outer job, MPI or an agent has left in it; no default that the job overrides; no secret, since
    a cluster's accounting may store what is submitted.
    """
    ours = {each.option for each in directives}
    variables = {name: environ[name] for name in (*_EXPORTED, *SLURM_VARIABLES) if name in environ}
    defaults: dict[str, str] = {}
    for name in (name for name in environ if name.startswith("SBATCH_")):
        option = SBATCH_DEFAULTS.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-"))
        if option in _NEVER_BY_DEFAULT or option in ours or _SAME.get(option) in ours:
            continue
        defaults[name] = option
        variables[name] = environ[name]
    return SubmissionEnvironment(variables, defaults)


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
