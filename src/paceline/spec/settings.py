"""All settings: the tables of `paceline.toml`, the flags that set keys, other names for them."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from paceline.contract.redaction import REDACTED
from paceline.errors import SpecError
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
from paceline.spec.quantities import show_seconds, slurm_size
from paceline.spec.training_tables import (
    Checkpoint,
    Data,
    Notify,
    Resume,
    Runtime,
    SweepTable,
    Tracking,
)
from paceline.spec.values import Count, Line, Mebibytes, Seconds, Table

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


# -- what a site sets


class Defaults(Table):
    """For jobs that do not say otherwise."""

    partition: Line | None = None
    account: Line | None = None


class Limits(Table):
    """What no file and no flag of a user can exceed."""

    requeues_per_day: Count | None = None
    keep_data: Seconds | None = None
    stage_size: Mebibytes | None = None  # per node
    poll_interval: Seconds | None = None  # at least


class Site(Table):
    """What a site sets; nothing if it has no file."""

    defaults: Defaults = Field(default_factory=Defaults.model_construct)
    limits: Limits = Field(default_factory=Limits.model_construct)

    def describe(self) -> str:
        """Return what the site sets in one line; empty if it sets nothing."""
        limits = self.limits
        parts = [f"default {key} {value}" for key, value in self.defaults if value is not None]
        if limits.requeues_per_day:
            parts.append(f"at most {limits.requeues_per_day} requeues a day")
        if limits.keep_data is not None:
            parts.append(f"staged data kept for {show_seconds(limits.keep_data)}")
        if limits.stage_size:
            parts.append(f"at most {slurm_size(limits.stage_size)} staged per node")
        if limits.poll_interval:
            parts.append(f"Slurm asked every {show_seconds(limits.poll_interval)}")
        return ", ".join(parts)

    def values(self) -> dict[str, Any]:
        """Return the site's defaults as tables of paceline.toml."""
        values = {key: value for key, value in self.defaults if value is not None}
        return {"job": values} if values else {}


# -- what is wrong with a value

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string, e.g. "text"',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "value_error": "{error}",
}

HIDDEN = {"webhook", "command"}  # keys of [notify] whose wrong values may be secrets


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that a misspelt one most likely means."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else None


def show(value: object) -> str:
    """Return a value as TOML writes it, shortened. Of a table only the keys: the values may be
    secrets.
    """
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(map(str, value))}}}"
    elif isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(show, value))}]"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(error: Mapping[str, Any]) -> str:
    if error["type"] not in _EXPECTED:
        return str(error["msg"])
    text = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
    is_choice = error["type"] == "literal_error"
    return text.replace(" or ", ", ").replace("'", "") if is_choice else text


def _table(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model that a path of keys leads to."""
    model: Any = root
    for key in path:
        model = model.model_fields[key].annotation if key in model.model_fields else None
        if not is_table(model):
            return None
    return model  # type: ignore[no-any-return]


def explain(
    problem: ValidationError,
    *,
    where: str,
    prefix: Sequence[str] = (),
    root: type[BaseModel] = Tables,
) -> SpecError:
    """Return the first problem of a layer as an error. `prefix` is the layer's table in the
    file.
    """
    error = problem.errors(include_url=False)[0]
    path = [str(key) for key in error["loc"]]
    while path and (_table(path[:-1], root) is None):  # inside a value: name the key that holds it
        path.pop()
    full = [*prefix, *path]
    table = f"[{'.'.join(full[:-1])}] of {where}" if len(full) > 1 else where
    if error["type"] == "extra_forbidden":
        model = _table(path[:-1], root) or root
        known = sorted(model.model_fields)
        if model is Tables:
            known += ACCESS_KEYS if prefix else ["profiles"]
        owner = "".join(f"{each}." for each in prefix if root is Tables)
        is_settings = root is Tables or bool(prefix)  # or [sweep], which is beside them
        table_name = full[-2] if path[1:] else ""
        hint = (
            _suggest(full[-1], table_name, known, owner) if is_settings else _near(full[-1], known)
        )
        return SpecError(f"Unknown key {full[-1]!r} in {table}.", hint=hint)
    value = REDACTED if "notify" in full and full[-1] in HIDDEN else show(error["input"])
    return SpecError(f"Invalid {full[-1]} = {value} in {table}: use {_expected(error)}.")


def _near(key: str, known: Sequence[str]) -> str:
    close = nearest(key, known)
    return f"Did you mean {close!r}?" if close else f"Use one of {', '.join(known)}."


def _suggest(key: str, table: str, known: Sequence[str], owner: str) -> str:
    """Return what to use instead of an unknown key: of its own table, or of the one it belongs in.

    `owner` comes before the names of tables: `profiles.alps.`
    """
    models = {name: _table([name], Tables) for name in Tables.model_fields}
    tables = {name: sorted(each.model_fields) for name, each in models.items() if each}
    for name, keys in tables.items():  # often a key is right, but in the wrong table
        if key in keys:
            return f"Move it to [{owner}{name}]."
    if meant := find_key(key):
        name, _, key = meant.partition(".")
        return f"Did you mean {key!r}{_elsewhere(owner, name, table)}?"
    every = {each: name for name, keys in tables.items() for each in keys}
    if len(key) > 3 and not nearest(key, known) and (close := nearest(key, list(every))):
        return f"Did you mean {close!r}{_elsewhere(owner, every[close], table)}?"
    hint = _near(key, known)
    if hint.startswith("Use"):
        hint += f" Settings of your script go after it (train.py --{key} ...), or into [params], "
        hint += f"which it reads as run.params.{key}."
    return hint


def _elsewhere(owner: str, name: str, table: str) -> str:
    return "" if name == table else f" in [{owner}{name}]"


def explain_flag(problem: ValidationError, flag: str) -> SpecError:
    """Return the same for a value from the command line."""
    error = problem.errors(include_url=False)[0]
    given = error["input"]
    typed = given[0] if isinstance(given, list) and len(given) == 1 else given
    value = REDACTED if flag.removeprefix("--notify-") in HIDDEN else show(typed)
    hint = ""
    if flag == "--profile":
        hint = "It chooses steps to profile. For a cluster, use --on or --cluster-profile."
    if flag.startswith("--gpus") and (match := re.fullmatch(r"(?:gpu:)?(\w+:)?(\d+)", str(given))):
        kind = f" --gpu-type {match[1][:-1]}" if match[1] else ""
        hint = f"Write --gpus {match[2]}{kind}."
    return SpecError(f"Invalid {flag} {value}: use {_expected(error)}.", hint=hint)
