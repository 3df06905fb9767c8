"""All settings: the tables of `paceline.toml`, the flags that set keys, other names for them, how
files are read, and what is wrong with a value.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, PlainSerializer, ValidationError

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
from paceline.spec.quantities import show_seconds
from paceline.spec.training_tables import (
    Checkpoint,
    Data,
    Notify,
    Resume,
    Runtime,
    SweepTable,
    Tracking,
)
from paceline.spec.values import Count, Host, Line, Mebibytes, Seconds, Table, Text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FILE, PROJECT_FILE = "paceline.toml", "pyproject.toml"
MAX_LITERAL = 1000  # characters of a value in Python's syntax

SITE_FILE = Path("/etc/paceline/site.toml")
PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
Checked = TypeVar("Checked", bound=BaseModel)


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


class Access(Table):
    """How `--on NAME` reaches a cluster over SSH."""

    host: Host | None = None
    python: Text | None = None  # the interpreter to use there
    setup: Text | None = None  # shell commands that come first there, such as `module load python`


class Profile(Access, Tables):
    """`[profiles.NAME]`: a cluster, and overrides of the other tables for it."""


class File(Tables):
    """All that a file may have."""

    profiles: dict[str, Profile] = Field(default_factory=dict)


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
    for group, table in ((group, table) for group, tables in GROUPS.items() for table in tables):
        model: Any = SweepTable if table == "sweep" else Tables.model_fields[table].annotation
        fields = {table: Tables.model_fields["params"]}
        if is_table(model):
            fields = {f"{table}.{key}": each for key, each in model.model_fields.items()}
        for key, each in fields.items():
            for option in (rule for rule in each.metadata if isinstance(rule, Option)):
                kind = _kind(each) if option.kind == TEXT else option.kind
                yield replace(option, key=key, kind=kind, group=option.group or group)


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

Duration = Annotated[Seconds, PlainSerializer(show_seconds, when_used="json")]


class Defaults(Table):
    """For jobs that do not say otherwise."""

    partition: Line | None = None
    account: Line | None = None


class Limits(Table):
    """What no file and no flag of a user can exceed."""

    requeues_per_day: Count | None = None
    keep_data: Duration | None = None
    stage_size: Mebibytes | None = None  # per node
    poll_interval: Duration | None = None  # at least


class Site(Table):
    """What a site sets; nothing if it has no file."""

    defaults: Defaults = Field(default_factory=Defaults.model_construct)
    limits: Limits = Field(default_factory=Limits.model_construct)

    def values(self) -> dict[str, Any]:
        """Return the site's defaults as tables of paceline.toml."""
        return {"job": self.model_dump(exclude_none=True)["defaults"]}


# -- what is wrong with a value

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string, e.g. "text"',
    "tuple_type": 'a list of strings, e.g. ["one", "two"]',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "too_short": "a list of values",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "value_error": "{error}",
}

HIDDEN = {"webhook", "command"}  # keys of [notify] whose wrong values may be secrets


@functools.cache
def prepare(*kinds: type[BaseModel]) -> None:
    """Have pydantic prepare the validation of tables.

    It looks for no plugins: to find them, it would read the metadata of every installed package.
    """
    if PLUGINS not in os.environ:
        os.environ[PLUGINS] = "__all__"
        for kind in kinds:
            kind.model_rebuild()
        del os.environ[PLUGINS]


def check(values: object, where: object, kind: type[Checked]) -> Checked:
    """Return the values of a file as tables. Errors name the file and the key."""
    prepare(kind)
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        raise explain(problem, where=where, kind=kind) from None


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that a misspelt one most likely means."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else None


def show(value: object) -> str:
    """Return a value as TOML writes it, shortened. Of a table only the keys: the values may be
    secrets.
    """
    if isinstance(value, Mapping):
        text = f"{{{', '.join(map(str, value))}}}"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(show, value))}]"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(error: Mapping[str, Any]) -> str:
    if error["type"] not in _EXPECTED:
        return str(error["msg"])
    text = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
    is_choice = error["type"] == "literal_error"
    return text.replace(" or ", ", ").replace("'", "") if is_choice else text


def _table(path: Sequence[str], kind: Any) -> Any:
    """Return the table that a path of keys leads to; None inside a value."""
    for key in path:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif is_table(kind):
            field = kind.model_fields.get(key)
            kind = field.annotation if field else None
    return kind if is_table(kind) else None


def explain(problem: ValidationError, *, where: object, kind: Any) -> SpecError:
    """Return the first problem of a file as an error."""
    error = problem.errors(include_url=False)[0]
    path = [str(key) for key in error["loc"]]
    while len(path) > 1 and _table(path[:-1], kind) is None:  # name the key that holds the value
        path.pop()
    *tables, key = path or [""]
    place = f"[{'.'.join(tables)}] of {where}" if tables else where
    if error["type"] == "missing":
        return SpecError(f"{place} has no {key!r}.", hint="Add it.")
    if error["type"] == "extra_forbidden":
        return SpecError(f"Unknown key {key!r} in {place}.", hint=_suggest(key, tables, kind))
    value = REDACTED if "notify" in tables and key in HIDDEN else show(error["input"])
    name = f"{key} = " if key else ""
    return SpecError(f"Invalid {name}{value} in {place}: use {_expected(error)}.")


def _suggest(key: str, tables: Sequence[str], kind: Any) -> str:
    """Return what to use instead of an unknown key: of its own table, or of the one it belongs
    in.
    """
    known = sorted(_table(tables, kind).model_fields)
    close = nearest(key, known)
    if is_table(kind) and issubclass(kind, Tables):
        owner = ".".join([*tables[:2], ""]) if tables[:1] == ["profiles"] else ""
        every = {
            each: table
            for table in Tables.model_fields
            if (model := _table([table], Tables)) is not None
            for each in sorted(model.model_fields)
        }
        if key in every:  # often a key is right, but in the wrong table
            return f"Move it to [{owner}{every[key]}]."
        meant = find_key(key)
        if not meant and not close and len(key) > 3 and (other := nearest(key, list(every))):
            meant = f"{every[other]}.{other}"
        if meant:
            table, _, other = meant.partition(".")
            is_here = [*tables] == [*f"{owner}{table}".split(".")]
            return f"Did you mean {other!r}{'' if is_here else f' in [{owner}{table}]'}?"
    if close:
        return f"Did you mean {close!r}?"
    hint = f"Use one of {', '.join(known)}."
    if kind is File:
        hint += f" Settings of your script go after it (train.py --{key} ...), or into [params], "
        hint += f"which it reads as run.params.{key}."
    return hint


def explain_flag(problem: ValidationError, flag: str) -> SpecError:
    """Return the same for a value from the command line."""
    error = problem.errors(include_url=False)[0]
    given = error["input"]
    typed = given[0] if isinstance(given, list) and len(given) == 1 else given
    value = REDACTED if flag.removeprefix("--notify-") in HIDDEN else show(typed)
    hint = ""
    if flag.startswith("--gpus") and (match := re.fullmatch(r"(?:gpu:)?(\w+:)?(\d+)", str(given))):
        kind = f" --gpu-type {match[1][:-1]}" if match[1] else ""
        hint = f"Write --gpus {match[2]}{kind}."
    return SpecError(f"Invalid {flag} {value}: use {_expected(error)}.", hint=hint)


@functools.cache
def find_site() -> Site:
    """Read `/etc/paceline/site.toml`: a site's defaults for jobs, and limits that its users cannot
    exceed.
    """
    if not SITE_FILE.is_file():
        return Site()
    try:
        return check(read_file(SITE_FILE), SITE_FILE, Site)
    except SpecError as error:
        hint = f"{error.hint} Your administrators maintain this file.".strip()
        raise SpecError(error.message, hint=hint) from None


# -- files, and values on the command line


def read_file(file: Path) -> dict[str, Any]:
    """Read a TOML file as plain values; of a pyproject.toml only `[tool.paceline]`."""
    try:
        # some editors write a mark first
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        reason = problem.strerror or problem
        raise SpecError(
            f"Cannot read {file}: {reason}.", hint="Check the path and its permissions."
        ) from None
    except ValueError as problem:
        raise SpecError(f"{file} is not valid TOML: {problem}.", hint="Fix that line.") from None
    if file.name == PROJECT_FILE:
        values = values.get("tool", {}).get("paceline", {})
    return {key: _as_json(value) for key, value in values.items()}


def parse_param(text: str) -> tuple[list[str], Any]:
    """Parse `model.width=64` into (["model", "width"], 64)."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise SpecError(f"Invalid --param {text!r}: use key=value, e.g. lr=0.1 or model.width=64.")
    return path, parse_value(value)


def parse_value(text: str) -> Any:
    """Parse a value in TOML syntax (0.1, true, [1, 2], "text") or Python's (True, None, .1); else
    return the text.
    """
    try:
        # in brackets: a comment or a further line would be no value
        closed = tomllib.loads(f"value = [{text}]")["value"]
        value = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return _python_value(text)
    # A string with newlines may parse as further keys, and JSON has no dates.
    return closed[0] if len(value) == len(closed) == 1 and _as_json(closed) == closed else text


def _python_value(text: str) -> Any:
    """Return True, False, None, a number or a list of such as Python spells them; anything else as
    a string.
    """
    try:
        value = ast.literal_eval(text) if len(text) <= MAX_LITERAL and "#" not in text else text
        is_plain = json.loads(json.dumps(value)) == value and not isinstance(value, dict)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if is_plain else text


def _as_json(value: Any) -> Any:
    """Return dates and times as strings; everything else in TOML is plain data."""
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else value
