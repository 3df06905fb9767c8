"""The environment that sbatch is called in: what travels from the submitter's shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.slurm.sbatch_directives import Directive

# What a job inherits from the shell that submits it. Everything else that it needs is in
# environment.sh.
_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "TZ", "KRB5CCNAME")
SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")

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

# Options that a default in the environment must never set: counts of tasks and GPUs, and how a run
# is requeued.
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

    Nothing that an outer job, MPI or an agent has left in it; no default that the job overrides; no
    secret, since a cluster's accounting may store what is submitted.
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
