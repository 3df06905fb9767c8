"""Write docs/reference and the manual page from the code: every key, flag, command, method and file.

`python docs/site/reference.py` writes the pages; `make docs` runs it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from docstrings import (
    SOURCE,
    Callable,
    body,
    class_docstring,
    find_class,
    read_callable,
    read_fields,
    read_members,
    to_markdown,
)
from pydantic import BaseModel

import paceline
from paceline import _NAMES
from paceline.cli.command_table import ABOUT, COMMANDS, SUBCOMMANDS
from paceline.cli.parser import load_command
from paceline.contract import env
from paceline.spec import sweep
from paceline.spec import values as types
from paceline.spec.option import Option
from paceline.spec.settings import TABLE, Tables, options_of
from paceline.spec.training_tables import SweepTable

REFERENCE = Path(__file__).parents[1] / "reference"


ROW = (("", ""),)  # the facts of an entry that has none, and is a row of a table


@dataclass(frozen=True)
class Entry:
    """A key, a flag, a method."""

    name: str
    text: str  # what it is, in Markdown
    facts: tuple[tuple[str, str], ...] = ()  # such as its type and its default


@dataclass(frozen=True)
class Section:
    """A heading with an introduction and entries. Those with facts are rows of one table, the others have headings."""

    title: str
    intro: str = ""
    example: str = ""  # a block of code
    language: str = "toml"
    entries: Sequence[Entry] = field(default_factory=tuple)

    def to_markdown(self) -> str:
        parts = [f"## {self.title}", self.intro]
        if self.example:
            parts.append(f"```{self.language}\n{self.example.rstrip()}\n```")
        tabular = [entry for entry in self.entries if entry.facts]
        if tabular:
            parts.append(_table(tabular))
        parts += [
            f"### `{entry.name}`\n\n{entry.text}" for entry in self.entries if not entry.facts
        ]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Page:
    file: str
    title: str
    intro: str
    sections: Sequence[Section]

    def to_markdown(self) -> str:
        note = "<!-- Generated from the code: do not edit. `make docs` writes this page. -->"
        contents = " · ".join(
            f"[{_plain(each.title)}](#{anchor(each.title)})" for each in self.sections
        )
        body = "\n\n".join(section.to_markdown() for section in self.sections)
        return f"# {self.title}\n\n{note}\n\n{self.intro}\n\n{contents}\n\n{body}\n"


def anchor(title: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _plain(title: str) -> str:
    return title.replace("[", "\\[").replace("]", "\\]")


def _table(entries: Sequence[Entry]) -> str:
    heads = ["name", *(name for name, _ in entries[0].facts if name), "meaning"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for entry in entries:
        cells = [f"`{entry.name}`", *(text for name, text in entry.facts if name), entry.text]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


# -- configuration

# What each kind of value looks like in TOML.
_TYPES: tuple[tuple[Any, str], ...] = (
    (types.Events, "list of strings"),
    (types.Requeue, '`true` or `false`, or `"always"`'),
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
    (types.Text, "string"),
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


def configuration_page() -> Page:
    intro = (
        "Paceline reads the nearest `paceline.toml`, or `[tool.paceline]` of `pyproject.toml`, up to the root of the "
        "repository. Flags override a [profile](#profilesname), which overrides the rest of the file. `paceline init` "
        "creates one."
    )
    sections = [*_project_sections(), _params(), _profiles(), _sweep(), _space()]
    return Page(
        "configuration.md", "Configuration: `paceline.toml` and `sweep.toml`", intro, sections
    )


def _project_sections() -> Iterator[Section]:
    for table, kind in {n: f.annotation for n, f in Tables.model_fields.items()}.items():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            entries = tuple(_entries(table, kind))
            yield Section(f"[{table}]", example=_EXAMPLES.get(table, ""), entries=entries)


def _entries(table: str, kind: type[BaseModel]) -> Iterator[Entry]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in kind.model_fields:
            continue
        general = _options(f"{table}.{name}")
        flags = ", ".join(
            f"`{each.all_flags[-1] if len(each.flags) > 2 else each.name}`"
            for each in general
            if each.flags
        )
        bare = _bare(hint)
        facts = (
            ("type", type_text(bare)),
            ("default", default_text(kind.model_fields[name].default, bare)),
            ("flag", flags),
        )
        texts = [each.help for each in general]
        if len(texts) > 1:
            texts = [f"`{each.name}`: {each.help}" for each in general]
        yield Entry(name, " ".join(texts), facts)


def _options(key: str) -> list[Option]:
    """Return the options of a key, one of each name; those of builds alone only without others."""
    found = [option for group in TABLE.values() for option in group if option.key == key]
    named = {option.name: option for option in reversed(found)}
    general = [each for each in reversed(named.values()) if each.commands != {"env"}]
    return general or found


def _bare(hint: Any) -> Any:
    """Return an annotation without what it says about flags."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *rules = get_args(hint)
    rules = [each for each in rules if not isinstance(each, Option)]
    return Annotated[(kind, *rules)] if rules else kind


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
    return Section("[params]", intro, "[params]\nlr = 0.1\nmodel.width = 64")


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
    entries = [Entry(name, text, (("type", "string"),)) for name, text in _ACCESS.items()]
    example = '[profiles.alps]\nhost = "login.alps"\n\n'
    example += '[profiles.alps.job]\npartition = "normal"\n\n[profiles.alps.environment]\nmodules = ["cuda/12.4"]'
    return Section("[profiles.NAME]", intro, example, entries=tuple(entries))


def _sweep() -> Section:
    entries = []
    for name, hint in get_type_hints(SweepTable, include_extras=True).items():
        if name in SweepTable.model_fields:
            key = "tracking.wandb_sweep" if name == "wandb_sweep" else f"sweep.{name}"
            (option,) = _options(key)
            default = default_text(SweepTable.model_fields[name].default)
            flag = f"`{option.name}`" if option.flags else ""
            facts = (("type", type_text(_bare(hint))), ("default", default), ("flag", flag))
            entries.append(Entry(name, option.help, facts))
    intro = "In a [sweep's file](../sweeps.md), next to the tables above, which override those of `paceline.toml`."
    example = '[sweep]\nscript = "train.py"\nmetric = "loss"\nsampler = "tpe"\ncount = 40'
    return Section("[sweep]", intro, example, entries=tuple(entries))


def _space() -> Section:
    entries = [
        Entry(name, text, (("example", f"`{example}`"),))
        for name, (example, text) in sweep.RANGE_HELP.items()
    ]
    intro = (
        "In a sweep's file: what to try for each parameter. From a list, each trial takes one value; a plain value is"
        " the same in every trial. Other ranges are tables:"
    )
    example = '[space]\noptimizer = ["adam", "sgd"]\nlr = { log_uniform = [1e-4, 1.0] }\nmodel.heads = [4, 8]'
    return Section("[space]", intro, example, entries=tuple(entries))


# -- commands


def commands_page() -> Page:
    intro = (
        "Options of Paceline go before the script; everything after it is passed to the script unchanged. First come "
        "the commands with their own options, then the settings that several commands take. A switch "
        "such as `--requeue` is turned off with `--no-requeue`. `paceline COMMAND --help` prints the "
        "options of a command."
    )
    sections = [_command(name, command) for name, command in walk()]
    sections += [
        _group(group, [each for each in options if each.flags]) for group, options in TABLE.items()
    ]
    return Page("commands.md", "Commands and options", intro, sections)


def walk() -> Iterator[tuple[str, Any]]:
    """Yield every command and subcommand, as click has it."""
    for name in COMMANDS:
        command = load_command(name)
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", each) for sub, each in below.items() if not each.hidden)
        for pair in SUBCOMMANDS:
            if pair.startswith(f"{name} "):
                yield pair, load_command(pair)


def _command(name: str, command: Any) -> Section:
    settings = [] if name in SUBCOMMANDS else list(options_of(name.split(maxsplit=1)[0]))
    shared = {option.name for _, option in settings}
    groups = dict.fromkeys(group for group, _ in settings) if _takes(command, shared) else {}
    usage = [f"paceline {name}", "[OPTIONS]", *_arguments(command)]
    epilog = inspect.cleandoc((command.epilog or "").replace("\b", "").strip("\n"))
    entries = []
    for param in command.params:
        if param.param_type_name == "argument":
            entries.append(
                Entry(str(param.metavar or param.name), getattr(param, "help", "") or "", ROW)
            )
        elif (
            not getattr(param, "hidden", False)
            and param.name != "help"
            and not shared & set(param.opts)
        ):
            flags = [*param.opts, *param.secondary_opts]
            value = "" if param.is_flag else f" {param.metavar or str(param.name).upper()}"
            entries.append(Entry(f"{', '.join(flags)}{value}", param.help or "", ROW))
    intro = inspect.cleandoc(command.help or "")
    if groups:
        links = ", ".join(f"[{group}](#{anchor(group)})" for group in groups)
        intro += f"\n\nIt also takes the options in these groups that name it: {links}."
    example = "\n".join([f"$ {' '.join(usage)}", *(["", epilog] if epilog else [])])
    title = f"paceline {name}"
    return Section(title, intro, example, language="text", entries=tuple(entries))


def _takes(command: Any, shared: set[str]) -> bool:
    return any(shared & set(param.opts) for param in command.params)


def _arguments(command: Any) -> Iterator[str]:
    for param in command.params:
        if param.param_type_name == "argument":
            name = str(param.metavar or param.name)
            yield name if param.required or "[" in name else f"[{name}]"


def _group(group: str, options: Sequence[Option]) -> Section:
    entries = []
    for option in options:
        value = f" {option.metavar}" if option.metavar else ""
        name = f"{', '.join(option.flags)}{value}"
        takers = ", ".join(name for name in COMMANDS if name in option.commands)
        key = (
            ""
            if option.key == "params"
            else f"`[{option.key.split('.')[0]}]` `{option.key.split('.')[1]}`"
        )
        entries.append(Entry(name, option.text, (("commands", takers), ("key", key))))
    return Section(group, entries=tuple(entries))


# -- the runtime

RUN_CLASS = ("runtime/run.py", "Run")
# What `Run` takes over from its parts.
PARTS = {"runtime/training/gradients.py": ("Gradients", ("autocast", "backward", "update"))}
_APART = ("Run", "session", "PacelineError")


def api_page() -> Page:
    intro = "What a script imports: `import paceline`. The [runtime guide](../runtime.md) shows how to use it."
    sections = [_session(), _attributes(), _methods(), _others()]
    return Page("api.md", "Runtime API", intro, sections)


def _session() -> Section:
    made = read_callable("runtime/session.py", "session")
    defaults = dict(
        part.split("=", 1) for part in made.signature.strip("()").split(", ") if "=" in part
    )
    entries = [
        Entry(name, text, (("default", f"`{defaults.get(name, '')}`"),))
        for name, text in read_fields(made.docstring, "Args:").items()
    ]
    raised = read_fields(made.docstring, "Raises:")
    intro = (
        body(made.docstring)
        + "\n\nRaises:\n\n"
        + "\n".join(f"- `{n}`: {t}" for n, t in raised.items())
    )
    return Section("paceline.session", intro, entries=tuple(entries))


def _attributes() -> Section:
    text = class_docstring(*RUN_CLASS)
    listed = read_fields(text, "Attributes:")
    entries = [
        _named(name.strip(), meaning)
        for names, meaning in listed.items()
        for name in names.split(",")
        if name.strip() not in _taken_over()
    ]
    known = {entry.name for entry in entries}
    for each in read_members(*RUN_CLASS):
        if each.is_property and f"run.{each.name}" not in known:
            entries.append(_named(each.name, " ".join(each.docstring.split())))
    return Section("Attributes of Run", body(text), entries=tuple(entries))


def _named(name: str, meaning: str) -> Entry:
    return Entry(f"run.{name}", meaning, ROW)


def _taken_over() -> set[str]:
    return {name for _, names in PARTS.values() for name in names}


def _methods() -> Section:
    found = [each for each in read_members(*RUN_CLASS) if not each.is_property]
    for file, (kind, names) in PARTS.items():
        found += [each for each in read_members(file, kind) if each.name in names]
    entries = [_call(each, "run.", f"run.{each.name}") for each in found]
    return Section("Methods of Run", entries=tuple(entries))


def _others() -> Section:
    entries = []
    for name, module in _NAMES.items():
        if name not in _APART:
            file = f"{module.removeprefix('paceline.').replace('.', '/')}.py"
            made = read_callable(file, name)
            entries.append(
                _call(made, "paceline.", f"paceline.{name}", members=tuple(_members(file, name)))
            )
    return Section("Other names", entries=tuple(entries))


def _members(file: str, name: str) -> Iterator[Callable]:
    if name[0].isupper():
        yield from read_members(file, name)


def _call(made: Callable, owner: str, name: str, members: tuple[Callable, ...] = ()) -> Entry:
    parts = [f"```python\n{owner}{made.name}{made.signature}\n```", to_markdown(made.docstring)]
    if members:
        lines = [
            f"- `{each.name}{each.signature}`: {' '.join(body(each.docstring).split())}"
            for each in members
        ]
        parts.append("\n".join(lines))
    return Entry(name, "\n\n".join(parts))


# -- files of a run

RUN = "contract/run_folder.py"
SWEEP_FOLDER = "contract/sweep_folder.py"
CHECKPOINT = "contract/checkpoint.py"
# Each section: its title, the file and class that name its files, and an introduction.
_FOLDERS = (
    ("The run folder", RUN, "RunFolder", ""),
    ("attempt-N", RUN, "AttemptFolder", ""),
    ("job-starts/JOB-RESTARTS", RUN, "JobStartFolder", ""),
    (
        "The folder of a sweep",
        SWEEP_FOLDER,
        "SweepFolder",
        "`<scratch>/<project>/<experiment>/<sweep>`.",
    ),
    (
        "trials/N",
        SWEEP_FOLDER,
        "TrialFolder",
        "The run folder of a trial, with these additional files.",
    ),
)


def run_folder_page() -> Page:
    intro = (
        "A run is a folder of plain files: `cat`, `tail -f` and `jq` work. Every file has one writer, which appends to "
        "it or renames it into place, so a file that you read is never half written. `paceline show` prints the "
        "folder's path. [How it works](../how-it-works.md#the-run-folder) explains the words."
    )
    sections = [_folder(*each) for each in _FOLDERS]
    sections.insert(3, _checkpoint())
    return Page("run-folder.md", "Files of a run", intro, sections)


def _folder(title: str, file: str, kind: str, intro: str) -> Section:
    entries = [Entry(names, _sentence(text), ROW) for names, text in _files(file, kind)]
    return Section(title, intro or class_docstring(file, kind), entries=tuple(entries))


def _checkpoint() -> Section:
    texts = dict(_constants(CHECKPOINT))
    entries = [
        Entry(name, _sentence(texts[name]), ROW) for name in ("complete.json", "objects.json")
    ]
    for node in ast.parse((SOURCE / CHECKPOINT).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("share_file", "state_file"):
            suffix = ".json" if node.name == "state_file" else ".safetensors"
            text = (ast.get_docstring(node) or "").removeprefix(
                "Return the name of the file that holds "
            )
            entries.append(
                Entry(f"{node.name.split('_')[0]}-RANK-of-RANKS{suffix}", _sentence(text), ROW)
            )
    return Section("checkpoints/step-N", "", entries=tuple(entries))


def _constants(file: str) -> list[tuple[str, str]]:
    text = (SOURCE / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = ((re.match(r'[A-Z_]+ = "([^"]+)"', line), number) for number, line in enumerate(lines))
    return [(match[1], _comment(lines, number)) for match, number in found if match]


def _comment(lines: list[str], number: int) -> str:
    """Return the comment behind a line of code, or the one above it."""
    if behind := lines[number].partition("  # ")[2]:
        return behind
    first = number
    while lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(line.strip()[2:] for line in lines[first:number])


def _files(file: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each file that a class names, in order."""
    lines = (SOURCE / file).read_text(encoding="utf-8").splitlines()
    for node in find_class(file, kind).body:
        if isinstance(node, ast.Assign) and (
            match := re.search(r'Entry\("([^"]+)"\)', lines[node.lineno - 1])
        ):
            yield match[1], _comment(lines, node.lineno - 1)
        elif isinstance(node, ast.FunctionDef) and (name := _returned_name(node)):
            yield name, (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")


def _returned_name(node: ast.FunctionDef) -> str:
    """Return the name in `return self.path / f"rank-{rank}.log"`, with N for the rank; "" for other methods."""
    last = node.body[-1]
    if (
        not isinstance(last, ast.Return)
        or not isinstance(last.value, ast.BinOp)
        or not ast.get_docstring(node)
    ):
        return ""
    folder, name = ast.unparse(last.value.left), ast.unparse(last.value.right)
    parts = [part for part in re.findall(r"\w+", folder) if part not in ("self", "path")]
    return "/".join([*parts, re.sub(r"\{[^}]+\}", "N", name.lstrip("f").strip("'\""))])


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:] if text and text[0] != "`" else text
    return text if text.endswith(".") or not text else f"{text}."


# -- the manual page

_MANUAL_FILES = (
    ("paceline.toml", "Settings of a project: the nearest one, up to the root of the repository."),
    (
        "~/.config/paceline/secrets.env",
        "Keys and passwords for all projects, readable by you alone.",
    ),
    ("/etc/paceline/site.toml", "Defaults and limits of your site."),
)
_MANUAL_VARIABLES = (
    (env.SCRATCH, "The scratch folder, which holds all run folders."),
    (env.PROFILE, "The profile of paceline.toml to use."),
    (env.POLL_INTERVAL, "How long Paceline reuses an answer from Slurm, in seconds."),
    (env.SANDBOX, "The folder of the sandbox."),
)


def to_roff(page: Page) -> str:
    """Return the manual page, from the page about commands and options."""
    lines = [
        f'.TH PACELINE 1 "" "paceline {escape(paceline.__version__)}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "paceline \\- run PyTorch scripts on this machine or on Slurm",
        ".SH SYNOPSIS",
        ".B paceline",
        ".I COMMAND",
        "[OPTIONS] [SCRIPT [ARGS]...]",
        ".SH DESCRIPTION",
        *_roff_text(f"{ABOUT.replace(chr(10), ' ')}\n\n{page.intro}"),
    ]
    commands = [section for section in page.sections if section.title.startswith("paceline ")]
    lines += [
        ".SH COMMANDS",
        *_roff_list(
            (name, text[0].upper() + text[1:] + ".") for name, (_, text) in COMMANDS.items()
        ),
    ]
    for section in commands:
        lines += _roff_section(section)
    lines.append(".SH OPTIONS")
    for section in page.sections:
        if section not in commands:
            lines += _roff_section(section)
    lines += [
        ".SH ENVIRONMENT",
        *_roff_list(_MANUAL_VARIABLES),
        ".SH FILES",
        *_roff_list(_MANUAL_FILES),
    ]
    lines += [".SH SEE ALSO", ".BR sbatch (1),", ".BR srun (1),", ".BR torchrun (1)"]
    return "\n".join(lines) + "\n"


def _roff_section(section: Section) -> Iterator[str]:
    yield f".SS {escape(section.title)}"
    intro = re.sub(
        r"It also takes the options in these groups that name it: .*",
        "See also OPTIONS.",
        section.intro,
    )
    yield from _roff_text(intro)
    if section.example:
        yield from (
            ".PP",
            ".nf",
            *(escape(line) or "\\&" for line in section.example.splitlines()),
            ".fi",
        )
    yield from _roff_list((entry.name, entry.text) for entry in section.entries)


def _roff_list(entries: Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, text in entries:
        yield from (".TP", f"\\fB{escape(name)}\\fR", escape(_roff_plain(text)) or "\\&")


def _roff_text(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield from (
                ".PP",
                *(
                    escape(_roff_plain(line).strip())
                    for line in paragraph.splitlines()
                    if line.strip()
                ),
            )


def _roff_plain(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text.replace("`", ""))


def escape(text: str) -> str:
    """Return a line of text that roff takes as text."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("→", "->")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _pages() -> list[Page]:
    return [configuration_page(), commands_page(), api_page(), run_folder_page()]


def every_entry() -> Iterator[tuple[str, str]]:
    """Yield each name and what it means, without blocks of code."""
    for page in _pages():
        for section in page.sections:
            for entry in section.entries:
                yield entry.name, re.sub(r"```.*?```", "", entry.text, flags=re.DOTALL)


def make_files() -> dict[str, str]:
    """Return the text of each file of the reference by its name."""
    pages = {page.file: page.to_markdown() for page in _pages()}
    return {**pages, "paceline.1": to_roff(commands_page())}


if __name__ == "__main__":
    for file, text in make_files().items():
        (REFERENCE / file).write_text(text, encoding="utf-8")
