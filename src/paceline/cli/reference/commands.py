"""The page about the command line: each command with its own options, and the settings that several commands take."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.cli import single_command
from paceline.cli.command_table import COMMANDS
from paceline.cli.reference.entries import ROW, Entry, Page, Section, anchor
from paceline.spec.option_table import TABLE, Option, options_of


def make_page() -> Page:
    intro = (
        "Options of Paceline go before the script; everything after it is passed to the script unchanged. First come "
        "the commands with their own options, then the settings that several commands take. A switch "
        "such as `--requeue` is turned off with `--no-requeue`. In a terminal, `paceline reference --nodes` prints an "
        "entry of this page, and `paceline COMMAND --help` the options of a command."
    )
    sections = [_command(name, command) for name, command in walk()]
    sections += [
        _group(group, [each for each in options if each.flags]) for group, options in TABLE.items()
    ]
    return Page("commands.md", "Commands and options", intro, sections)


def walk() -> Iterator[tuple[str, Any]]:
    """Yield every command and subcommand, as click has it."""
    from typer.main import get_command

    for name, (module_name, _) in COMMANDS.items():
        module = importlib.import_module(module_name)
        app = getattr(module, "app", None)
        if app is None or hasattr(module, "SUBCOMMANDS"):
            yield name, get_command(single_command(module.command))
        else:
            made: Any = get_command(app)
            commands = getattr(made, "commands", None)
            yield from (
                [(name, made)]
                if commands is None
                else ((f"{name} {sub}", each) for sub, each in commands.items() if not each.hidden)
            )
        for sub, other in getattr(module, "SUBCOMMANDS", {}).items():
            yield (
                f"{name} {sub}",
                get_command(single_command(importlib.import_module(other).command)),
            )


def _command(name: str, command: Any) -> Section:
    settings = list(options_of(name.split(maxsplit=1)[0]))
    shared = {option.name for _, option in settings}
    groups = dict.fromkeys(group for group, _ in settings) if _takes(command, shared) else {}
    usage = [f"paceline {name}", "[OPTIONS]", *_arguments(command)]
    epilog = inspect.cleandoc((command.epilog or "").replace("\b", "").strip("\n"))
    entries = []
    for param in command.params:
        if param.param_type_name == "argument":
            entries.append(
                Entry((str(param.metavar or param.name),), getattr(param, "help", "") or "", ROW)
            )
        elif (
            not getattr(param, "hidden", False)
            and param.name != "help"
            and not shared & set(param.opts)
        ):
            flags = [*param.opts, *param.secondary_opts]
            value = "" if param.is_flag else f" {param.metavar or str(param.name).upper()}"
            names = (f"{', '.join(flags)}{value}", *flags, *(f"{name} {flag}" for flag in flags))
            entries.append(Entry(names, param.help or "", ROW))
    intro = inspect.cleandoc(command.help or "")
    if groups:
        links = ", ".join(f"[{group}](#{anchor(group)})" for group in groups)
        intro += f"\n\nIt also takes the options in these groups that name it: {links}."
    example = "\n".join([f"$ {' '.join(usage)}", *(["", epilog] if epilog else [])])
    title = f"paceline {name}"
    return Section(title, (name, title), intro, example, language="text", entries=tuple(entries))


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
        names = (f"{', '.join(option.flags)}{value}", *option.all_flags)
        takers = ", ".join(name for name in COMMANDS if name in option.commands)
        key = (
            ""
            if option.key == "params"
            else f"`[{option.key.split('.')[0]}]` `{option.key.split('.')[1]}`"
        )
        entries.append(Entry(names, option.help, (("commands", takers), ("key", key))))
    return Section(group, (group,), entries=tuple(entries))
