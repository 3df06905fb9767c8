"""How typer reads the command line: commands that are imported when typed, help in groups, and what mistakes mean."""

from __future__ import annotations

import difflib
import importlib
import inspect
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from paceline.cli import forwarding
from paceline.cli.command_table import ABOUT, COMMANDS, OTHER_NAMES, SUBCOMMANDS
from paceline.errors import UsageError
from paceline.spec.option import PROJECT
from paceline.spec.settings import TABLE, find_option, options_of

GENERAL = "Options"
WIDTH = 110
RANKS_INSTEAD = (
    "`paceline run` starts one rank per GPU. For 2 ranks, use --nproc 2; to choose the GPUs, set"
    " CUDA_VISIBLE_DEVICES=0,1."
)
# Options that a command does not have, nor anything like it, and what to do instead.
INSTEAD = {
    "--on": "It goes after a command that works on a cluster: paceline ps --on CLUSTER",
    **dict.fromkeys(
        ("--array", "-a"), "Use `paceline sweep`: it submits job arrays, with one trial per point."
    ),
    **dict.fromkeys(
        ("--standalone", "--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port"),
        "Omit it: Paceline finds the nodes and a free port itself.",
    ),
}


_ON = next(each for each in TABLE[PROJECT] if each.key == "project.on")
On = Annotated[
    str | None, typer.Option(_ON.name, metavar=_ON.metavar, help=_ON.help, rich_help_panel=PROJECT)
]
Sure = Annotated[
    bool,
    typer.Option(
        "--yes", help="With --on: send code and secrets without asking.", rich_help_panel=PROJECT
    ),
]


def _forwarding_options(on: On = None, yes: Sure = False) -> None:
    """What makes a command run on a cluster. It does not learn of them."""


def make_app() -> Any:
    """Return the whole command line, as click has it."""
    app = typer.Typer(cls=CommandGroup, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.callback(help=ABOUT)
    def paceline() -> None:
        """Everything is in the commands."""

    return get_command(app)


def load_command(name: str) -> Any:
    """Import a command, or a subcommand such as `sweep show`, and return it as click has it."""
    name, _, verb = name.partition(" ")
    module = importlib.import_module(COMMANDS[name][0])
    app = getattr(module, "app", None)
    return single_command(getattr(module, verb or "command")) if app is None else get_command(app)


def make_group(help: str) -> typer.Typer:
    """Return a command that has subcommands alone."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )

    @app.callback(help=help)
    def group() -> None:
        """Also with one subcommand alone."""

    return app


def single_command(function: Any) -> Any:
    """Return a function as a command. If it takes a script, options end at the script."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"allow_interspersed_args": not getattr(function, "takes_a_script", False)}
    app.command(cls=GroupedCommand, context_settings=settings)(function)
    return get_command(app)


class CommandGroup(TyperGroup):
    """All commands; each is imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if (pair := " ".join(args[:2])) in SUBCOMMANDS:
            return pair, load_command(pair), args[2:]
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise _unknown_command(args[0])
        return args[0], self.get_command(ctx, args[0]), args[1:]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a command without importing all of them."""
        return [
            SimpleNamespace(type="plain", value=name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]


class GroupedCommand(TyperCommand):
    """A command whose options are grouped by their `rich_help_panel`.

    What follows `\\b` in the docstring is examples.
    """

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        text, mark, examples = inspect.cleandoc(help or "").partition("\b")
        settings = {"max_content_width": WIDTH, **(more.pop("context_settings", None) or {})}
        epilog = f"{mark}\nExamples:\n{examples.strip(chr(10))}" if examples else None
        super().__init__(
            *args, **{**more, "help": text.strip(), "epilog": epilog, "context_settings": settings}
        )
        if (key := forwarding.key_of(self)) in forwarding.FORWARDED:
            app = typer.Typer(add_completion=False)
            app.command()(_forwarding_options)
            on, yes = [each for each in get_command(app).params if each.name != "help"]
            on.expose_value = yes.expose_value = False
            self.params += [on, yes] if key in forwarding.ASKS else [on]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; with `--on`, raise `Forwarded` in place of the command."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        names_a_run, script = getattr(self.callback, "names_a_run", None), values.get("args")
        is_program = values.get("module") or values.get("is_job")
        if names_a_run and script and not is_program and names_a_run(script[0]):
            # options after a run are ours, too
            ctx.allow_interspersed_args = True
            values, _, order = self.make_parser(ctx).parse_args(list(args))
        rest = super().parse_args(ctx, list(args))
        forwarding.forward_if_asked(self, ctx, values, order)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write an argument as its metavar, in brackets if it may be omitted."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        names = [(str(each.metavar or each.name), each.required) for each in arguments]
        shown = [name if "[" in name or needed else f"[{name}]" for name, needed in names]
        return [self.options_metavar or "", *shown]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            **{name: [] for name in TABLE},
            GENERAL: [],
        }
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                text = getattr(param, "help", None) or ""
                groups["Arguments"].append((param.metavar or str(param.name), text))
            elif record := param.get_help_record(ctx):
                group = getattr(param, "rich_help_panel", None) or GENERAL
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


# -- mistakes ------------------------------------------------------------------------------------


def usage_error(error: Any) -> UsageError:
    """Return a usage error of click's as ours, with what to do about it."""
    path = error.ctx.command_path if error.ctx else "paceline"
    name, hint = path.partition(" ")[2], f"See `{path} --help`."
    option, message = getattr(error, "option_name", ""), f"{error.format_message().rstrip('.')}."
    if type(error).__name__ != "NoSuchOption":
        return UsageError(message, hint=hint)
    meant = find_option(option, name)
    takes = [f"`paceline {each}`" for each in ("run", "submit") if _has(each, option)]
    if instead := INSTEAD.get(option.replace("_", "-")):
        message, hint = f"No such option: {option}.", instead
    elif takes:
        message = f"{option} applies to {' and '.join(takes)}, not to `paceline {name}`."
        hint = RANKS_INSTEAD if name == "run" and "gpu" in option else hint
    elif meant is not None:
        message = f"No such option: {option}. Did you mean {meant.name}?"
    elif error.ctx and getattr(error.ctx.command.callback, "takes_a_script", False):
        hint = f"Options of your script go after it: paceline {name} train.py {option} ... {hint}"
    return UsageError(message, hint=hint)


def _has(command: str, flag: str) -> bool:
    return any(flag in each.all_flags for _, each in options_of(command))


def _unknown_command(name: str) -> UsageError:
    close = difflib.get_close_matches(name, (*COMMANDS, *OTHER_NAMES), n=1)
    hint = f"The commands are {', '.join(COMMANDS)}."
    if name.endswith(".py"):
        hint = f"Did you mean `paceline run {name}`?"
    elif close:
        hint = f"Did you mean `{OTHER_NAMES.get(close[0], f'paceline {close[0]}')}`?"
    return UsageError(f"There is no command {name!r}.", hint=hint)
