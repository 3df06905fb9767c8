"""Which commands `--on CLUSTER` or a default cluster takes to a login node, and the line to type there.

typer parses a command; then `forward_if_asked` raises `Forwarded` in place of it, and `on_cluster` carries it out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.cli import console
from paceline.contract import env
from paceline.errors import UsageError
from paceline.slurm.commands import configured
from paceline.spec.clusters import ProjectFile
from paceline.spec.option import VARIABLES
from paceline.spec.settings import TABLE
from paceline.watch import origin

HERE, ALL = "here", "all"  # as --on: this machine, whatever paceline.toml says; every cluster
# Commands that have the option, by their key: the module, and the subcommand if a module has several.
FORWARDED = {
    *("submit", "sweep", "sweep_show", "sweep_cancel", "ps", "show", "logs", "wait", "report"),
    *("cancel", "sync", "doctor", "shell", "env_build"),
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
    """Return the name of a command in tables: `ps`, `sweep_show`, `env_build`."""
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


def find_project(asked: Forwarded) -> ProjectFile:
    config = asked.values.get("config")
    return ProjectFile.find(Path.cwd(), Path(config) if config else None)


class FileName(str):
    """A word of a command line that names a file of this machine."""


def mark_file(word: str) -> str:
    """Return a word as a `FileName` if there is such a file, perhaps with extras as in pyproject.toml[gpu]."""
    return FileName(word) if os.path.isfile(without_extras(word)) else word


def without_extras(word: str) -> str:
    return word if os.path.exists(word) else word.partition("[")[0]
