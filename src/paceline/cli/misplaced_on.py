"""`--on` before the command or the subcommand that it belongs to: what to type instead."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.on_cluster import FORWARDED
from paceline.errors import UsageError
from paceline.plan.quote import command_line

ON = "--on"
PLACEHOLDER = "CLUSTER"
EXAMPLE = "ps"


def is_on(word: str) -> bool:
    return word.partition("=")[0] == ON


def does_not_apply(name: str, hint: str = "") -> UsageError:
    instead = "Use `paceline submit --on CLUSTER`." if name == "run" else hint
    return UsageError(f"--on does not apply to `paceline {name}`, which works on this machine.", hint=instead)


def explain_misplaced(args: Sequence[str], modules: Mapping[str, str], group: str = "") -> UsageError:
    """Return the error for arguments that begin with `--on`, typed after `group` or before any command.

    `modules` are those of all commands.
    """
    cluster, words = _take_cluster(args)
    if group:
        words = [group, *words]
    elif not words and cluster in modules:  # as in `paceline --on ps`
        cluster, words = PLACEHOLDER, [cluster]
    if words and words[0] in modules and not _takes_on(modules[words[0]]):
        return does_not_apply(words[0])
    is_example = not words or words[0] not in modules
    if is_example:
        words = [EXAMPLE]
    known = _subcommands(importlib.import_module(modules[words[0]]))
    if group and len(words) == 1:
        is_example = cluster not in known  # otherwise as in `paceline env --on list`
        words, cluster = (words + known[:1], cluster) if is_example else ([group, cluster], PLACEHOLDER)
    length = 2 if group or (words[1:2] and words[1] in known) else 1
    line = command_line(["paceline", *words[:length], ON, cluster, *words[length:]])
    return UsageError(
        f"--on goes after the {'subcommand' if length > 1 else 'command'}.",
        hint=f"Type{', for example' if is_example else ''}: {line}",
    )


def _take_cluster(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the cluster that the first arguments name, and the other arguments."""
    _, equals, value = args[0].partition("=")
    if equals:
        return value or PLACEHOLDER, list(args[1:])
    return next(iter(args[1:2]), PLACEHOLDER), list(args[2:])


def _takes_on(module: str) -> bool:
    name = module.rpartition(".")[2]
    return any(key == name or key.startswith(f"{name}_") for key in FORWARDED)


def _subcommands(module: Any) -> list[str]:
    if hasattr(module, "SUBCOMMANDS"):
        return list(module.SUBCOMMANDS)
    app = getattr(module, "app", None)
    if app is None:
        return []
    from typer.main import get_command

    return list(getattr(get_command(app), "commands", ()))
