"""What people type for a key or a flag: names from other tools, flags in a file, keys as flags.

Errors about flags and files and `paceline reference` all ask here. It imports nothing heavy, as the
table of options.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.option_table import TABLE, Option, options_of

# Each key, and its names in sbatch, torchrun, Lightning, Accelerate and in people's heads.
SYNONYMS: Mapping[str, str] = {
    "launch.nproc": "rank ranks nranks num_ranks ranks_per_node nproc_per_node procs "
    "procs_per_node processes"
    " num_processes ntasks ntasks_per_node tasks tasks_per_node devices world_size",
    "job.nodes": "node nnodes num_nodes n_nodes",
    "job.gpus_per_node": "gpu gpus num_gpus n_gpus ngpus gres",
    "job.gpu_type": "gpu_model",
    "job.cpus_per_gpu": "cpus cpus_per_task cpus_per_rank cores ncpus",
    "job.mem_per_node": "mem memory ram",
    "job.time": "walltime time_limit timelimit time_min max_time",
    "job.partition": "queue",
    "job.name": "job_name run_name",
    "job.mail": "mail_user email",
    "resume.max_attempts": "max_restarts restarts retries max_retries attempts",
    "checkpoint.every_steps": "save_every save_steps checkpoint_every",
    "checkpoint.every_seconds": "save_seconds",
    "checkpoint.keep_last": "save_total_limit",
    "environment.variables": "environment_variables export",
    "environment.image": "container container_image",
    "environment.modules": "modules",
    "launch.style": "launcher",
    "project.scratch": "log_dir output_dir out_dir",
    "runtime.precision": "amp dtype mixed_precision",
    "runtime.start_from": "pretrained weights resume_from",
}
_KEYS = {name: key for key, names in SYNONYMS.items() for name in names.split()}

# The short options of sbatch that Paceline does not have: the key that each means, and what its
# flag counts instead.
SHORT_OPTIONS: Mapping[str, tuple[str, str]] = {
    "-n": ("launch.nproc", "It counts the ranks of each node, not all tasks."),
    "-c": ("job.cpus_per_gpu", "It counts the cores per GPU, or per rank without GPUs."),
    "-G": ("job.gpus_per_node", "It counts the GPUs of each node, not of the job."),
    "-q": ("job.qos", ""),
    "-C": ("job.constraint", ""),
    "-w": ("job.nodelist", ""),
    "-x": ("job.exclude", ""),
    "-d": ("job.dependency", ""),
}

# Hyperparameters: they are the script's own.
_OF_SCRIPTS = (
    "lr",
    "learning_rate",
    "batch",
    "batch_size",
    "epoch",
    "epochs",
    "num_epochs",
    "max_epochs",
    "weight_decay",
    "momentum",
    "dropout",
    "optimizer",
    "scheduler",
    "warmup",
    "warmup_steps",
    "hidden",
    "hidden_size",
    "width",
    "depth",
    "layers",
    "num_layers",
    "num_workers",
    "clip",
    "grad_clip",
    "model",
    "dataset",
)


def find_key(name: str) -> str | None:
    """Return the key ("launch.nproc") that somebody means by a flag, a key or another tool's name
    for it.
    """
    if len(name) == 2 and name.startswith("-"):
        return SHORT_OPTIONS[name][0] if name in SHORT_OPTIONS else None  # -n is not -N
    plain = _normalize(name)
    options = [
        option
        for group in TABLE.values()
        for option in group
        if not option.key.startswith(("sweep.", "param"))
    ]
    by_flag = [option.key for option in options if plain in map(_normalize, option.flags)]
    by_key = {option.key for option in options if plain == option.key.partition(".")[2]}
    if by_flag:
        return by_flag[0]
    return _KEYS.get(plain) or (by_key.pop() if len(by_key) == 1 else None)


def find_option(name: str, command: str) -> Option | None:
    """Return the option of a command that somebody means by a flag that it does not have."""
    key, plain = find_key(name), _normalize(name)
    found = [option for _, option in options_of(command) if option.key == key]
    same = (option for option in found if plain in map(_normalize, option.flags))
    return next(same, found[0] if found else None)


def is_of_script(name: str) -> bool:
    """Whether a name is one that scripts give their own settings, such as `lr`."""
    return _normalize(name) in _OF_SCRIPTS


def _normalize(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")
