"""Which variables of the submitter travel with a job, and which must not."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.contract import env
from paceline.contract.files.environment_file import SECRETS_MARK
from paceline.contract.quote import quote
from paceline.contract.redaction import REDACTED, redact
from paceline.launch.environment.activation import module_variables
from paceline.launch.secrets.declared import Secrets, belongs_to_script
from paceline.spec import Job

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
