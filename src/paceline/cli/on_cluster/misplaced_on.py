"""`--on` before the command or the subcommand that it belongs to: what to type instead."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from typer.main import get_command

from paceline.cli.command_table import SUBCOMMANDS
from paceline.cli.on_cluster.on_cluster import FORWARDED
from paceline.contract.quote import command_line
from paceline.contract.redaction import redact_args
from paceline.errors import UsageError

ON = "--on"
PLACEHOLDER = "CLUSTER"
EXAMPLE = "ps"


def is_on(word: str) -> bool:
    return word.partition("=")[0] == ON


def does_not_apply(name: str, hint: str = "") -> UsageError:
    instead = "Use `paceline submit --on CLUSTER`." if name == "run" else hint
    return UsageError(
        f"--on does not apply to `paceline {name}`, which works on this machine.", hint=instead
    )


def explain_misplaced(
    args: Sequence[str], modules: Mapping[str, str], group: str = ""
) -> UsageError:
    """Return the error for arguments that begin with `--on`, typed after `group` or before any command.

    `modules` are those of all commands.
    """
    cluster, words = _take_cluster(args)
    if group:
        words = [group, *words]
    elif not words and cluster in modules:  # as in `paceline --on ps`
        cluster, words = PLACEHOLDER, [cluster]
    if words and words[0] in modules and not takes_on(modules[words[0]]):
        return does_not_apply(words[0])
    is_example = not words or words[0] not in modules
    if is_example:
        words = [EXAMPLE]
    known = _subcommands(modules[words[0]])
    if group and len(words) == 1:
        is_example = cluster not in known  # otherwise as in `paceline env --on list`
        words, cluster = (
            (words + known[:1], cluster) if is_example else ([group, cluster], PLACEHOLDER)
        )
    line = insert_on(words, modules[words[0]], cluster)
    return UsageError(
        f"--on goes after the {'subcommand' if group or (words[1:2] and words[1] in known) else 'command'}.",
        hint=f"Type{', for example' if is_example else ''}: {line}",
    )


def insert_on(words: Sequence[str], module: str, cluster: str) -> str:
    """Return a command line with `--on` where it belongs; `words` are a command, and perhaps its subcommand."""
    length = 2 if {*words[1:2]} & {*_subcommands(module)} or _is_group(module) else 1
    return command_line(["paceline", *words[:length], ON, cluster, *redact_args(words[length:])])


def _take_cluster(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the cluster that the first arguments name, and the other arguments."""
    _, equals, value = args[0].partition("=")
    if equals:
        return value or PLACEHOLDER, list(args[1:])
    return next(iter(args[1:2]), PLACEHOLDER), list(args[2:])


def takes_on(module: str) -> bool:
    name = module.rpartition(".")[2]
    return any(key == name or key.startswith(f"{name}_") for key in FORWARDED)


def _subcommands(name: str) -> list[str]:
    own = [each.split()[1] for each, module in SUBCOMMANDS.items() if module.startswith(f"{name}_")]
    app = getattr(importlib.import_module(name), "app", None)
    return own or (list(getattr(get_command(app), "commands", ())) if app is not None else [])


def _is_group(name: str) -> bool:
    """Return whether the command of a module always has a subcommand."""
    return hasattr(importlib.import_module(name), "app")
