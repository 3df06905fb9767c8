"""The page about paceline.toml and sweep.toml: each key, its type, its default, its flag and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from paceline.cli.reference.entries import Entry, Page, Section
from paceline.spec import sweep
from paceline.spec import types_and_defaults as types
from paceline.spec.option_table import SWEEP, TABLE, Option

# What each kind of value looks like in TOML.
_TYPES: tuple[tuple[Any, str], ...] = (
    (types.Warm, '`true`, `false` or a duration: `"30m"`'),
    (types.Seconds, 'duration: `"90s"`, `"10m"`'),
    (types.Grace, 'duration: `"90s"`, `"10m"`'),
    (types.TimeLimit, 'time: `"90m"`, `"1-12:00:00"`'),
    (types.Mebibytes, 'size: `"32G"`'),
    (types.Strings, "list of strings"),
    (types.StringOrList, "string, or list of strings"),
    (types.Variables, "table of strings"),
    (types.FolderName, "string"),
    (types.Line, "string"),
    (types.UserPath, "string"),
    (types.UserPaths, "list of strings"),
    (types.Count, "number from 1"),
    (types.Nodes, "number from 1"),
    (types.PerNode, "number from 1"),
    (bool, "`true` or `false`"),
    (int, "number"),
    (str, "string"),
    (dict[str, Any], "table"),
)

_EXAMPLES = {
    "project": '[project]\nname = "vision"\nscratch = "/scratch/me"',
    "job": '[job]\nnodes = 2\ngpus_per_node = 8\ntime = "4h"\npartition = "gpu"',
    "environment": '[environment]\nkind = "venv"\npath = ".venv"\nmodules = ["cuda/12.4"]\n'
    'variables = { NCCL_DEBUG = "WARN" }',
    "launch": '[launch]\nnproc = 4\npreload = ["transformers"]',
    "runtime": '[runtime]\nprecision = "bf16"\nseed = 0',
    "checkpoint": '[checkpoint]\nevery_seconds = "10m"\nkeep_last = 2',
    "resume": '[resume]\nmax_attempts = 5\nhang_timeout = "10m"',
    "data": '[data]\nstage = ["imagenet"]\nkeep = "2d"',
    "notify": '[notify]\nwebhook = "SLACK_WEBHOOK"\non = ["failed", "stalled"]',
    "tracking": '[tracking]\nwandb_project = "vision"',
}


def make_page() -> Page:
    intro = (
        "Paceline reads the nearest `paceline.toml`, or `[tool.paceline]` of `pyproject.toml`, up to the root of the "
        "repository. Flags override a [profile](#profilesname), which overrides the rest of the file. `paceline init` "
        "creates one. In a terminal, `paceline reference KEY` prints an entry of this page."
    )
    sections = [*_project_sections(), _params(), _profiles(), _sweep(), _space()]
    return Page(
        "configuration.md", "Configuration: `paceline.toml` and `sweep.toml`", intro, sections
    )


def _project_sections() -> Iterator[Section]:
    for table, kind in get_type_hints(types.Tables).items():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            entries = tuple(_entries(table, kind))
            yield Section(
                f"[{table}]",
                (table, f"[{table}]"),
                example=_EXAMPLES.get(table, ""),
                entries=entries,
            )


def _entries(table: str, kind: type[BaseModel]) -> Iterator[Entry]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in kind.model_fields:
            continue
        options = [
            option
            for group in TABLE.values()
            for option in group
            if option.key == f"{table}.{name}"
        ]
        general = [option for option in options if option.commands != frozenset({"env"})] or options
        flags = ", ".join(
            f"`{option.all_flags[-1] if len(option.flags) > 2 else option.name}`"
            for option in general
            if option.flags
        )
        facts = (
            ("type", type_text(hint)),
            ("default", default_text(kind.model_fields[name].default, hint)),
            ("flag", flags),
        )
        texts = [_meaning(option) for option in general]
        if len(texts) > 1:
            texts = [
                f"`{option.name}`: {text}" for option, text in zip(general, texts, strict=True)
            ]
        yield Entry((name, f"{table}.{name}", f"[{table}] {name}"), " ".join(texts), facts)


def _meaning(option: Option) -> str:
    return option.help.replace("; repeatable.", ".")


def type_text(hint: Any) -> str:
    """Return what values look like, from an annotation."""
    for known, text in _TYPES:
        if hint == known:
            return text
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(hint))
    parts = [each for each in get_args(hint) if each is not type(None) and not _is_validator(each)]
    return (
        ", or ".join(type_text(each) for each in parts)
        if parts
        else getattr(hint, "__name__", str(hint))
    )


def _is_validator(each: Any) -> bool:
    return not isinstance(each, type) and get_origin(each) is None


def default_text(value: Any, hint: Any = None) -> str:
    """Return a default as TOML; nothing for one that depends on something else, which the meaning explains."""
    if value is None or value in ((), {}):
        return ""
    if hint == types.Warm:
        return "`false`"
    if hint in (types.Seconds, types.Mebibytes):
        return f'`"{value}{"s" if hint == types.Seconds else "M"}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _params() -> Section:
    intro = (
        "Hyperparameters of your script, of any name: `run.params.lr`, or `run.params.model.width` for a nested table. "
        "`--param lr=0.1` overrides one. Its value is in TOML's or Python's syntax (`true` or `True`, `.1`, `None`, "
        '`[1, 2]`, `"5"` for a string of digits); any other text is a string, even with a `#` in it.'
    )
    return Section(
        "[params]", ("params", "[params]", "--param"), intro, "[params]\nlr = 0.1\nmodel.width = 64"
    )


# How a cluster is reached over SSH.
_ACCESS = {
    "host": "The login node: a name of `~/.ssh/config`, or `user@host`.",
    "python": "Python 3.10 or newer there, for Paceline itself (default: the newest on the PATH).",
    "setup": "Shell commands to run there first, e.g. `module load python slurm`.",
}


def _profiles() -> Section:
    intro = (
        "Overrides for one cluster: the tables above, below the profile's name. Choose one with "
        "`--cluster-profile NAME` or the variable `PACELINE_PROFILE`. With a `host`, commands with `--on NAME` work on "
        "that cluster [over SSH](../remote.md). `~/.config/paceline/clusters.toml` may have a table such as `[alps]`, "
        "with the same three keys, for all your projects."
    )
    entries = [
        Entry((name, f"profiles.{name}"), text, (("type", "string"),))
        for name, text in _ACCESS.items()
    ]
    example = '[profiles.alps]\nhost = "login.alps"\n\n'
    example += '[profiles.alps.job]\npartition = "normal"\n\n[profiles.alps.environment]\nmodules = ["cuda/12.4"]'
    names = ("profiles", "[profiles]", "--cluster-profile")
    return Section("[profiles.NAME]", names, intro, example, entries=tuple(entries))


def _sweep() -> Section:
    options = {option.key.partition(".")[2]: option for option in TABLE[SWEEP]}
    entries = []
    for name, hint in get_type_hints(sweep.SweepTable, include_extras=True).items():
        if name in sweep.SweepTable.model_fields:
            default = default_text(sweep.SweepTable.model_fields[name].default)
            flag = f"`{options[name].name}`" if options[name].flags else ""
            facts = (("type", type_text(hint)), ("default", default), ("flag", flag))
            entries.append(Entry((name, f"sweep.{name}"), _meaning(options[name]), facts))
    intro = "In a [sweep's file](../sweeps.md), next to the tables above, which override those of `paceline.toml`."
    example = '[sweep]\nscript = "train.py"\nmetric = "loss"\nsampler = "tpe"\ncount = 40'
    return Section("[sweep]", ("sweep.toml", "[sweep]"), intro, example, entries=tuple(entries))


def _space() -> Section:
    entries = [
        Entry((name, f"space.{name}"), text, (("example", f"`{example}`"),))
        for name, (example, text) in sweep.RANGE_HELP.items()
    ]
    intro = (
        "In a sweep's file: what to try for each parameter. From a list, each trial takes one value; a plain value is"
        " the same in every trial. Other ranges are tables:"
    )
    example = '[space]\noptimizer = ["adam", "sgd"]\nlr = { log_uniform = [1e-4, 1.0] }\nmodel.heads = [4, 8]'
    return Section("[space]", ("space", "[space]"), intro, example, entries=tuple(entries))
