"""All settings: the tables of `paceline.toml`, the flags that set keys, other names for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from paceline.spec.job_tables import Environment, Launch, Project, Resources
from paceline.spec.option import (
    DATA,
    ENVIRONMENT,
    LAUNCH,
    LIST,
    NOTIFICATIONS,
    NUMBER,
    OUTPUT,
    PROJECT,
    PROVABLE,
    RESOURCES,
    SWEEP,
    SWITCH,
    TEXT,
    TRACKERS,
    TRAINING,
    UNTIL_DONE,
    VARIABLES,
    Option,
)
from paceline.spec.training_tables import (
    Checkpoint,
    Data,
    Notify,
    Resume,
    Runtime,
    SweepTable,
    Tracking,
)
from paceline.spec.values import Table

# of a profile, besides tables: how `--on NAME` reaches the cluster over SSH
ACCESS_KEYS = ("host", "python", "setup")


class Tables(Table):
    """A whole file, or one layer of it. `params` are the training script's own hyperparameters."""

    job: Resources = Field(default_factory=Resources.model_construct)
    launch: Launch = Field(default_factory=Launch.model_construct)
    environment: Environment = Field(default_factory=Environment.model_construct)
    params: Annotated[
        dict[str, Any],
        Option("--param K=V", "Hyperparameter: run.params.K in the script.", PROVABLE, kind=LIST),
    ] = Field(default_factory=dict)
    runtime: Runtime = Field(default_factory=Runtime.model_construct)
    resume: Resume = Field(default_factory=Resume.model_construct)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    data: Data = Field(default_factory=Data.model_construct)
    tracking: Tracking = Field(default_factory=Tracking.model_construct)
    notify: Notify = Field(default_factory=Notify.model_construct)
    project: Project = Field(default_factory=Project.model_construct)


# In the order in which `--help` shows the groups; each but OUTPUT is that of some tables.
GROUPS: Mapping[str, tuple[str, ...]] = {
    SWEEP: ("sweep",),
    RESOURCES: ("job",),
    LAUNCH: ("launch",),
    ENVIRONMENT: ("environment",),
    TRAINING: ("params", "runtime"),
    UNTIL_DONE: ("resume", "checkpoint"),
    DATA: ("data",),
    TRACKERS: ("tracking",),
    NOTIFICATIONS: ("notify",),
    PROJECT: ("project",),
    OUTPUT: (),
}


def _declared() -> Iterator[Option]:
    """Yield the options of all keys, with their group."""
    groups = {table: group for group, tables in GROUPS.items() for table in tables}
    models: dict[str, Any] = {"sweep": SweepTable}
    models |= {name: each.annotation for name, each in Tables.model_fields.items()}
    for table, model in models.items():
        found = model.model_fields if is_table(model) else {}
        fields = {f"{table}.{key}": each for key, each in found.items()}
        for key, field in (fields or {table: Tables.model_fields[table]}).items():
            for option in (each for each in field.metadata if isinstance(each, Option)):
                group, kind = option.group or groups[table], option.kind
                if kind == TEXT:
                    kind = _kind(field)
                yield replace(option, key=key, kind=kind, group=group)


def _kind(field: Any) -> str:
    """Return how a flag takes values of a field: durations and sizes are texts."""
    rules = [each for each in field.metadata if not isinstance(each, Option)]
    text = f"{field.annotation} {rules}"
    for kind, words in ((SWITCH, "bool"), (LIST, "tuple"), (VARIABLES, "dict")):
        if words in text:
            return kind
    return NUMBER if re.search(r"\bint\b", text) and "BeforeValidator" not in text else TEXT


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


_OPTIONS = tuple(_declared())
TABLE: Mapping[str, tuple[Option, ...]] = {
    group: tuple(each for each in _OPTIONS if each.group == group) for group in GROUPS
}


def options_of(command: str) -> Iterator[tuple[str, Option]]:
    """Yield the options that a command takes, each with its group."""
    for group, options in TABLE.items():
        yield from ((group, each) for each in options if command in each.commands)


# What sbatch, torchrun, Lightning, Accelerate and people call a key.
_OTHER_NAMES = {
    "launch.nproc": "-n ranks nranks num_ranks ranks_per_node nproc_per_node processes"
    " num_processes ntasks ntasks_per_node tasks_per_node devices world_size",
    "job.nodes": "node nnodes num_nodes",
    "job.gpus_per_node": "-G gpu gpus num_gpus gres",
    "job.cpus_per_gpu": "-c cpus cpus_per_task cores",
    "job.mem_per_node": "mem memory ram",
    "job.time": "walltime time_limit max_time",
    "job.partition": "queue",
    "job.name": "job_name run_name",
    "job.mail": "mail_user email",
    "job.qos": "-q",
    "job.constraint": "-C",
    "job.nodelist": "-w",
    "job.exclude": "-x",
    "job.dependency": "-d",
    "resume.max_attempts": "restarts retries max_retries attempts",
    "checkpoint.every_steps": "save_every save_steps checkpoint_every",
    "environment.variables": "export",
    "environment.image": "container container_image",
    "environment.modules": "modules",
    "launch.style": "launcher",
    "project.scratch": "log_dir output_dir out_dir",
    "runtime.precision": "amp dtype mixed_precision",
    "runtime.start_from": "pretrained weights resume_from",
}


@functools.cache
def _names() -> dict[str, str]:
    """Return the key that each flag and each other name means."""
    names = {_plain(flag): each.key for each in reversed(_OPTIONS) for flag in each.flags}
    return {
        **{name: key for key, others in _OTHER_NAMES.items() for name in others.split()},
        **{name: key for name, key in names.items() if not key.startswith(("sweep.", "params"))},
    }


def _plain(name: str) -> str:
    is_short = len(name) == 2 and name.startswith("-")  # -n is not -N
    return name if is_short else name.lstrip("-").lower().replace("-", "_")


def find_key(name: str) -> str | None:
    """Return the key ("launch.nproc") that a flag, a key or another tool's name for it means."""
    return _names().get(_plain(name))


def find_option(name: str, command: str) -> Option | None:
    """Return the option of a command that somebody means by a flag that it does not have."""
    found = [each for _, each in options_of(command) if each.key == find_key(name)]
    same = [each for each in found if _plain(name) in map(_plain, each.flags)]
    return next(iter(same + found), None)
