"""`--on CLUSTER`: carry out a command on a login node. One mechanism for all commands, before their own code runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli import console
from paceline.cli.cluster_request import FileName, make_request, mark_file
from paceline.contract import env
from paceline.contract.foreign_records import parse_object
from paceline.contract.verdict import USAGE_EXIT
from paceline.errors import EnvironmentProblem, NoSlurm, PacelineError, UsageError
from paceline.spec.option import PROJECT, VARIABLES
from paceline.spec.settings import TABLE
from paceline.spec.shell_text import quote

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
        """Typer makes options of parameters only; how it makes them depends on its version."""

    carrier.__annotations__ = {"on": Annotated[str | None, info], "yes": Annotated[bool, sure]}
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    names = ("on", YES) if key in ASKS else ("on",)
    made = [each for each in typer.main.get_command(app).params if each.name in names]
    for option in made:
        option.expose_value = False
    return made


def takes_on(command: str) -> bool:
    return any(key == command or key.startswith(f"{command}_") for key in FORWARDED)


def misplaced(command: str, *, is_group: bool, hint: str) -> UsageError:
    """Return the error for `--on` after `paceline COMMAND`, which does not have it."""
    if is_group and (not command or takes_on(command)):
        return UsageError(
            "--on goes after the command and its subcommand.",
            hint="Type, for example: paceline ps --on CLUSTER",
        )
    return UsageError(
        f"--on does not apply to `paceline {command}`, which works on this machine.",
        hint="Use `paceline submit --on CLUSTER`." if command == "run" else hint,
    )


def point_to_cluster(problem: NoSlurm, command: str) -> NoSlurm:
    """Return the error with a hint how to reach a cluster, whose login node has Slurm."""
    if on := os.environ.get(env.ON_CLUSTER):
        hint = (
            f"If /etc/profile on {on} does not set up Slurm, load it in [profiles.{quote(on)}],"
            ' for example with setup = "module load slurm".'
        )
        return NoSlurm(problem.message, hint=hint)
    if not takes_on(command):
        return problem
    from paceline.spec.clusters import suggest_clusters

    hint = suggest_clusters("jobs") or (
        "From a laptop, write the login node of your cluster into paceline.toml:\n"
        '    [profiles.alps]\n    host = "login.example.org"\n'
        f"  and type: paceline {command} --on alps ..."
    )
    otherwise = f"Otherwise, {problem.hint[:1].lower()}{problem.hint[1:]}" if problem.hint else ""
    return NoSlurm(problem.message, hint=f"{hint}\n  {otherwise}".rstrip(), earlier=problem.earlier)


def forward_if_asked(
    command: Any, ctx: Any, typed: list[str], script: list[str], values: Mapping[str, Any]
) -> None:
    """Raise `Forwarded` if `--on` or a default names a cluster."""
    if key_of(command) in ONLY_TYPED and not values.get("on"):
        return
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
    if on is None and names:
        from paceline.slurm.commands import configured

        return [] if configured() else names
    return names


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
    script = str(asked.values.get("script_only") or "/")
    if not script.startswith("/"):  # nobody looks into the copy of the project there
        raise UsageError(
            f"{script} would be written on {asked.names[0]}, not here.",
            hint=f"Give it a full path on the cluster, e.g. /scratch/me/{Path(script).name}",
        )
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


def ask(asked: Forwarded, line: list[str]) -> tuple[Connection, Mapping[str, Any]]:
    """Run a command on the cluster that `--on` names; return its answer. Raises what it complains of."""
    connection, answer = call(Forwarded(asked.names, asked.key, line, asked.values))
    if answer.code == 0:
        try:
            return connection, parse_object(answer.output)
        except ValueError:
            raise connection.unclear() from None
    raise read_error(answer.errors, answer.code, asked.names[0])


def read_error(errors: str, code: int, cluster: str) -> PacelineError:
    """Return the error that a command printed."""
    _, _, text = errors.rpartition("paceline: error: ")
    message, *hints = text.strip().splitlines() or [f"The command ended with exit code {code}."]
    kind = UsageError if code == USAGE_EXIT else EnvironmentProblem
    return kind(f"{cluster}: {message}", hint=" ".join(each.strip() for each in hints))
