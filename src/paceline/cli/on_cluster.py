"""`--on CLUSTER`: a command runs on a login node as it was typed, and prints here.

`forward_if_asked` takes the command away from typer, `forward` carries it out. What goes along is in
`cluster_request`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import console
from paceline.cli.cluster_request import FileName, make_request, mark_file
from paceline.contract import env
from paceline.contract.foreign_records import parse_object
from paceline.contract.verdict import USAGE_EXIT
from paceline.errors import EnvironmentProblem, NoSlurm, PacelineError, UsageError
from paceline.spec.option import VARIABLES
from paceline.spec.settings import TABLE
from paceline.spec.shell_text import quote
from paceline.watch import origin

if TYPE_CHECKING:
    from paceline.spec.clusters import ProjectFile
    from paceline.ssh.connection import Answer, Connection

HERE, ALL = "here", "all"  # as --on: this machine, whatever paceline.toml says; every cluster
# Commands that have the option, by their key: the module, and the subcommand if a module has several.
FORWARDED = {
    *("submit", "sweep", "sweep_show", "sweep_cancel", "ps", "show", "logs", "wait", "report"),
    *("cancel", "export", "sync", "doctor", "shell", "env_build", "env_list", "env_remove"),
    *("data_stage", "data_push", "clean", "fetch", "top", "ui", "init"),
}
ASKS = ("submit", "sweep", "doctor", "shell", "env_build")  # they may send code or secrets
# parameters that name files of the project; the script of a command that takes one is such a name
FILES = {"config", "file", "files"}


class Forwarded(Exception):
    """Raised in place of a command that is to run elsewhere. `names` are clusters, `line` what to run there."""

    def __init__(
        self, names: Sequence[str], key: str, args: list[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.names, self.key, self.line, self.values = names, key, args, values

    @property
    def has_several(self) -> bool:
        return len(self.names) > 1 or self.names[0] == ALL


def key_of(command: Any) -> str:
    """Return the name of a command in tables: `ps`, `sweep_show`, `env_list`."""
    module = str(getattr(command.callback, "__module__", "")).rpartition(".")[2]
    is_alone = getattr(command.callback, "__name__", "") == "command"
    return module if is_alone else f"{module}_{command.name}"


def forward_if_asked(
    command: Any, ctx: Any, values: Mapping[str, Any], typed: Sequence[Any]
) -> None:
    """Raise `Forwarded` if `--on` or a default names a cluster. `typed` are the parameters in their order."""
    key = key_of(command)
    asked = Forwarded([], key, _type_again(command, ctx, values, typed), values)
    for flag, name in pairwise(values.get("args") or ()):
        if flag == "--on" and name in find_project(asked).clusters():
            console.say_note(f"--on {name} goes to the script: type --on before it")
    # --local means this machine, and `init` writes a file of it
    counts = key in FORWARDED and key != "init" and not values.get("local")
    asked.names = _choose(asked, use_default=counts)
    if key not in FORWARDED or not asked.names:
        return
    if key == "sweep" and values.get("local"):
        raise UsageError(
            f"--local would run the trials on the login node of {console.printable(asked.names[0])}.",
            hint="Omit --local to submit them, or omit --on to run them on this machine.",
        )
    raise asked


def _choose(asked: Forwarded, *, use_default: bool) -> list[str]:
    """Return the clusters of a command; none if it runs here. A machine with Slurm needs no default."""
    if os.environ.get(env.ON_CLUSTER) or origin.shown() is not None:  # what shows a copy runs here
        return []
    typed = asked.values.get("on")
    default = os.environ.get(env.ON) or find_project(asked).default if use_default else ""
    names = [each for each in (typed or default or "").split(",") if each and each != HERE]
    if typed or not names:
        return names
    from paceline.slurm.commands import configured

    return [] if configured() else names


def _type_again(
    command: Any, ctx: Any, values: Mapping[str, Any], typed: Sequence[Any]
) -> list[str]:
    """Return the line for the cluster: without `--on` and the answer to a question that is asked here.

    Variables that were named without a value get this machine's. Files are marked as such.
    """
    variables = {
        each.parameter for group in TABLE.values() for each in group if each.kind == VARIABLES
    }
    line: list[str] = ctx.command_path.split()[1:]
    arguments: list[str] = []
    for param in dict.fromkeys(typed):
        value = values[param.name]
        found = [value] if isinstance(value, str) else value
        if param.name in variables:
            found = [f"{each}={os.environ[each]}" if each in os.environ else each for each in found]
        if param.name in FILES and value:
            found = [mark_file(each) for each in found]
        if param.param_type_name == "argument":
            arguments += found or []
        elif param.is_flag and param.expose_value:
            line.append(max(param.opts if value else param.secondary_opts, key=len))
        elif param.expose_value:
            flag = max(param.opts, key=len)
            for each in found:
                line += [flag, each] if isinstance(each, FileName) else [f"{flag}={each}"]
    is_script = getattr(command.callback, "takes_a_script", False)
    if is_script and arguments and not values.get("module"):
        arguments[0] = mark_file(arguments[0])
    before = arguments[:1] if is_script else arguments
    return [*line, *["--"] * any(each.startswith("-") for each in before), *arguments]


# -- carrying it out ---------------------------------------------------------------------------------------------


def forward(asked: Forwarded) -> int:
    """Carry out a command on a cluster and return its exit code."""
    from paceline.ssh import remote_command

    if asked.has_several:
        return forward_to_each(asked, forward)
    script = str(asked.values.get("script_only") or "/")
    if not script.startswith("/"):  # nobody looks into the copy of the project there
        raise UsageError(
            f"{script} would be written on {asked.names[0]}, not here.",
            hint=f"Give it a full path on the cluster, e.g. /scratch/me/{Path(script).name}",
        )
    connection, command = make_request(asked, find_project(asked))
    submits = asked.key == "submit" and not asked.values.get("dry_run") and script == "/"
    carry_out = remote_command.submit if submits else remote_command.carry_out
    return carry_out(connection, command)


def forward_to_each(asked: Forwarded, carry_out: Callable[[Forwarded], int]) -> int:
    """List the runs of several clusters, one after the other. One that cannot be reached does not hide the others."""
    names, codes = cluster_names(asked), [0]
    if asked.key != "ps" or asked.values.get("json"):
        hint = f"Run it once for each of {', '.join(names)}."
        if asked.key == "submit":
            hint = "Add --first to train on the cluster that starts first, or submit to each."
        raise UsageError("This takes one cluster.", hint=hint)
    for name in names:
        print(f"{console.printable(name)}:", flush=True)
        try:
            codes.append(carry_out(Forwarded([name], asked.key, asked.line, asked.values)))
        except PacelineError as problem:
            console.say_error(problem)
            codes.append(problem.exit_code)
    return max(codes)


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


def call(asked: Forwarded) -> tuple[Connection, Answer]:
    """Run a command on the cluster that `--on` names; return what it wrote. Raises what it complains of."""
    from paceline.ssh.remote_command import capture

    if asked.has_several:
        raise UsageError(
            "This takes one cluster.", hint=f"Run it once for each of {', '.join(asked.names)}."
        )
    connection, command = make_request(asked, find_project(asked))
    answer = capture(connection, command)
    if answer.code != 0:
        raise read_error(answer.errors, answer.code, asked.names[0])
    return connection, answer


def ask(asked: Forwarded, line: list[str]) -> tuple[Connection, Mapping[str, Any]]:
    """Do the same with a command whose answer is JSON."""
    connection, answer = call(Forwarded(asked.names, asked.key, line, asked.values))
    try:
        return connection, parse_object(answer.output)
    except ValueError:
        raise connection.unclear() from None


def read_error(errors: str, code: int, cluster: str) -> PacelineError:
    """Return the error that a command printed."""
    _, _, text = errors.rpartition("paceline: error: ")
    message, *hints = text.strip().splitlines() or [f"The command ended with exit code {code}."]
    kind = UsageError if code == USAGE_EXIT else EnvironmentProblem
    return kind(f"{cluster}: {message}", hint=" ".join(each.strip() for each in hints))


def point_to_cluster(problem: NoSlurm, command: str) -> NoSlurm:
    """Return the error with a hint how to reach a cluster, whose login node has Slurm."""
    if on := os.environ.get(env.ON_CLUSTER):
        hint = (
            f"If /etc/profile on {on} does not set up Slurm, load it in [profiles.{quote(on)}],"
            ' for example with setup = "module load slurm".'
        )
        return NoSlurm(problem.message, hint=hint)
    from paceline.spec.clusters import suggest_clusters

    hint = suggest_clusters("jobs") or (
        "From a laptop, write the login node of your cluster into paceline.toml:\n"
        '    [profiles.alps]\n    host = "login.example.org"\n'
        f"  and type: paceline {command} --on alps ..."
    )
    otherwise = f"Otherwise, {problem.hint[:1].lower()}{problem.hint[1:]}" if problem.hint else ""
    return NoSlurm(problem.message, hint=f"{hint}\n  {otherwise}".rstrip(), earlier=problem.earlier)
