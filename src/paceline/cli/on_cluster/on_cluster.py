"""`--on CLUSTER`: carry out a command on a login node. One mechanism for all commands, before their own code runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli import console
from paceline.cli.on_cluster.cluster_request import FileName, make_request, mark_file
from paceline.contract import env
from paceline.contract.quote import quote
from paceline.errors import PacelineError, UsageError
from paceline.spec.option import PROJECT, VARIABLES
from paceline.spec.settings import TABLE

if TYPE_CHECKING:
    from paceline.spec.clusters import ProjectFile
    from paceline.ssh.connection import Answer, Connection
    from paceline.ssh.remote_command import RemoteCommand

HERE = "here"  # as --on: this machine, whatever paceline.toml says
ALL = "all"
YES = "yes"  # answers the question whether to send code
# Commands that have the option, by their key: the module, and the subcommand if a module has several.
FORWARDED = frozenset(
    {
        "submit",
        "sweep",
        "sweep_show",
        "sweep_cancel",
        "ps",
        "show",
        "logs",
        "wait",
        "report",
        "cancel",
        "export",
        "sync",
        "doctor",
        "shell",
        "env_build",
        "env_list",
        "env_remove",
        "data_stage",
        "data_push",
        "clean",
        "fetch",
        "top",
        "ui",
        "init",
    }
)
# as arguments; the commands that take a script have its name there
TAKE_FILES = ("sweep", "env_build")
# they may send code or secrets
ASKS = ("submit", "sweep", "doctor", "shell", "env_build")
ONLY_TYPED = ("init",)  # a default cluster does not count
# Commands that write files: the parameter, and the file that is written without it.
OUTPUTS: dict[str, dict[str, str | None]] = {"submit": {"script_only": None}}


class Forwarded(Exception):
    """Raised in place of a command that is to run elsewhere. `names` are clusters, `line` what to run there."""

    def __init__(
        self, names: Sequence[str], key: str, args: list[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.names, self.key, self.line, self.values = names, key, args, values


def key_of(command: Any) -> str:
    """Return the name of a command in tables: `ps`, `sweep_show`, `env_list`."""
    module = str(getattr(command.callback, "__module__", "")).rpartition(".")[2]
    return (
        module
        if getattr(command.callback, "__name__", "") == "command"
        else f"{module}_{command.name}"
    )


def options_for(key: str) -> list[Any]:
    """Return the options of a command for typer: the cluster, and whether to ask before code goes there."""
    import typer

    described = next(each for each in TABLE[PROJECT] if each.key == "project.on")
    info = typer.Option(
        described.name, metavar=described.metavar, help=described.help, rich_help_panel=PROJECT
    )
    sure = typer.Option(
        "--yes", help="With --on: send code and secrets without asking.", rich_help_panel=PROJECT
    )

    def carrier(on: str | None = None, yes: bool = False) -> None:
        """Typer makes options of parameters only."""

    carrier.__annotations__ = {
        "on": Annotated[str | None, info],
        "yes": Annotated[bool, sure],
        "return": None,
    }
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    made: dict[str, Any] = {str(each.name): each for each in typer.main.get_command(app).params}
    names = ("on", YES) if key in ASKS else ("on",)
    for name in names:
        made[name].expose_value = False
    return [made[name] for name in names]


def forward_if_asked(
    command: Any, ctx: Any, typed: list[str], script: list[str], values: Mapping[str, Any]
) -> None:
    """Raise `Forwarded` if `--on` or a default names a cluster."""
    if key_of(command) in ONLY_TYPED and not values.get("on"):
        return
    if sum(word.partition("=")[0] == "--on" for word in typed) > 1:
        raise UsageError(
            "--on is given twice.", hint="Name one cluster, or several as in --on alps,cedar."
        )
    names = _chosen(values.get("on"), values.get("config"))
    if names and values.get("on") and values.get("local") and key_of(command) == "sweep":
        name = console.printable(names[0])
        raise UsageError(
            f"--local cannot be combined with --on: the trials would run on the login node of {name}.",
            hint=f"Omit --local to submit them to {name}, or omit --on to run them on this machine.",
        )
    # --local, typed alone, means this machine
    if names and (values.get("on") or not values.get("local")):
        path = ctx.command_path.split()[1:]
        if script and not values.get("module"):
            script = [mark_file(script[0]), *script[1:]]
        takes_files = key_of(command) in TAKE_FILES
        args = [*path, *without_option(typed, command.params, takes_files=takes_files), *script]
        raise Forwarded(names, key_of(command), args, values)


def note_misplaced(ctx: Any, script: Sequence[str], values: Mapping[str, Any]) -> None:
    """Say that `--on` with the name of a cluster goes to the script if it is typed after it."""
    words = dict(zip(script[1:], [*script[2:], ""], strict=False))
    found = [
        each.partition("=")[2] or words[each] for each in words if each.partition("=")[0] == "--on"
    ]
    if not found or os.environ.get(env.ON_CLUSTER):
        return
    from paceline.spec.clusters import ProjectFile

    config = values.get("config")
    known = {HERE, ALL, *ProjectFile.find(Path.cwd(), Path(config) if config else None).clusters()}
    for name in found:
        if known.issuperset(name.split(",")):
            command = (
                "submit"
                if ctx.command_path.endswith(" run")
                else ctx.command_path.partition(" ")[2]
            )
            typed = f"paceline {command} --on {quote(name)} {quote(script[0])}"
            console.say_note(
                f"--on {console.printable(name)} is passed to the script: options of Paceline go before the script, as"
                f" in `{typed}`"
            )


def _chosen(on: str | None, config: str | None) -> list[str]:
    if os.environ.get(env.ON_CLUSTER) or on == HERE:
        return []
    from paceline.spec.clusters import ProjectFile
    from paceline.watch import origin

    if origin.shown() is not None:  # what shows a copy runs here
        return []
    name = (
        on
        or os.environ.get(env.ON)
        or ProjectFile.find(Path.cwd(), Path(config) if config else None).default
    )
    names = [each for each in (name or "").split(",") if each and each != HERE]
    return [] if on is None and names and _is_slurm_machine() else names


def _is_slurm_machine() -> bool:
    from paceline.slurm.commands import configured

    return configured()


def without_option(
    typed: Sequence[str], params: Sequence[Any], *, takes_files: bool = False
) -> list[str]:
    """Return what was typed without `--on`, and without the `--yes` that goes with it: the question is asked here.

    Variables that were named without a value get this machine's. Files are marked as such.
    """
    mark = mark_file if takes_files else str
    takers = {
        flag: each for each in params if each.param_type_name == "option" for flag in each.opts
    }
    variables = {
        flag
        for group in TABLE.values()
        for each in group
        if each.kind == VARIABLES
        for flag in each.flags
    }
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word == "--":
            return [*kept, word, *map(mark, words)]
        flag, equals, value = (
            word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        )
        taker = takers.get(flag)
        if taker is None or taker.is_flag:
            kept += (
                [mark(word)]
                if taker is None
                else [word]
                if taker.name != YES or taker.expose_value
                else []
            )
            continue
        parts = [word] if equals or value else [word, next(words, "")]
        if flag in variables:
            text = value if equals else parts[1]
            parts = [
                flag,
                text if "=" in text or text not in os.environ else f"{text}={os.environ[text]}",
            ]
        elif flag == "--config":
            parts = [flag, FileName(value if equals else parts[1])]
        kept += parts if flag != "--on" else []
    return kept


# -- what goes there ---------------------------------------------------------------------------------------------


def forward(asked: Forwarded) -> int:
    """Carry out a command on a cluster and return its exit code."""
    from paceline.ssh import race, remote_command

    if len(asked.names) > 1 or asked.names[0] == ALL:
        return forward_to_each(asked, forward)
    _require_full_path(asked)
    race.remind()
    connection, command = make_request(asked, find_project(asked))
    does_not = ("dry_run", "script_only")
    if asked.key == "submit" and not any(asked.values.get(each) for each in does_not):
        return remote_command.submit(connection, command)
    return remote_command.carry_out(connection, command)


def one_command(asked: Forwarded) -> tuple[Connection, RemoteCommand]:
    """Return what carries a command out on one cluster, with its connection, which is open."""
    if len(asked.names) > 1 or asked.names[0] == ALL:
        raise _one_cluster(asked.names, asked.key)
    return make_request(asked, find_project(asked))


def call(asked: Forwarded) -> tuple[Connection, Answer]:
    """Carry a command out on one cluster; return what it wrote."""
    from paceline.ssh.remote_command import capture

    connection, command = one_command(asked)
    return connection, capture(connection, command)


def cluster_names(asked: Forwarded) -> Sequence[str]:
    if asked.names[0] != ALL:
        return asked.names
    from paceline.spec.clusters import explain_table

    project = find_project(asked)
    if not (names := sorted(project.clusters())):
        raise UsageError("No cluster is configured.", hint=explain_table(project))
    return names


def find_project(asked: Forwarded) -> ProjectFile:
    from paceline.spec.clusters import ProjectFile

    config = asked.values.get("config")
    return ProjectFile.find(Path.cwd(), Path(config) if config else None)


def _one_cluster(names: Sequence[str], key: str) -> UsageError:
    hint = f"Run it once for each of {', '.join(names)}."
    if key == "submit":
        hint = "Add --first to train on the cluster that starts first, or submit to each of them."
    return UsageError("This takes one cluster.", hint=hint)


def forward_to_each(asked: Forwarded, carry_out: Callable[[Forwarded], int]) -> int:
    """List the runs of several clusters, one after the other. One that cannot be reached does not hide the others."""
    names = cluster_names(asked)
    if asked.key != "ps" or asked.values.get("json"):
        raise _one_cluster(names, asked.key)
    worst = 0
    for name in names:
        print(f"{console.printable(name)}:", flush=True)
        try:
            code = carry_out(Forwarded([name], asked.key, asked.line, asked.values))
        except PacelineError as problem:
            console.say_error(problem)
            code = problem.exit_code
        worst = max(worst, code)
    return worst


def _require_full_path(asked: Forwarded) -> None:
    """Raise an error for a file that would be written into the copy of the project over there, where nobody looks."""
    for key, default in OUTPUTS.get(asked.key, {}).items():
        value = asked.values.get(key) or default
        if value and not str(value).startswith("/"):
            raise UsageError(
                f"{value} would be written on {asked.names[0]}, not here.",
                hint="Give it a full path on the cluster, e.g. /scratch/me/"
                + Path(str(value)).name,
            )
