"""The layout of `--help`: a description, the options in groups, and examples at the bottom."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from typer.core import TyperCommand

from paceline.cli.on_cluster import on_cluster
from paceline.cli.typer_options import TYPED
from paceline.errors import UsageError
from paceline.spec.option_table import TABLE
from paceline.spec.pydantic_plugins import plugins_disabled

GENERAL = "Options"
WIDTH = 110
NARROWEST = 22  # columns in which an explanation of an example wraps beside it
_EXAMPLE = re.compile(r"(\s*\S.*?\s{2,})(\S.*)")
_TYPE = re.compile(r"([a-z]+) <(int|str|path)>$")
_SWITCH = re.compile(r"--(\S+) / --no-\1$")


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
        if (key := on_cluster.key_of(self)) in on_cluster.FORWARDED:
            known = {flag for each in self.params for flag in each.opts}
            self.params += [
                each for each in on_cluster.options_for(key) if not known & {*each.opts}
            ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Options that nobody has typed get their default without typer, which takes 1 ms each."""
        values, excess, order = self.make_parser(ctx).parse_args(list(args))
        takes_a_script = getattr(self.callback, "takes_a_script", False)
        script = list(values.get("args") or ()) if takes_a_script else []
        typed = args[: len(args) - len(script)]
        if self._has_options_after_run(script):
            return self.parse_args(ctx, [*typed, *script[1:], script[0]])
        if any(param.is_eager for param in order):  # --help shows them all
            return super().parse_args(ctx, args)
        on_cluster.note_misplaced(ctx, script, values)
        if on_cluster.key_of(self) in on_cluster.FORWARDED:
            _reject_two_clusters(order)
            # otherwise typer says what is wrong
            if not excess and not self._lacks_argument(values):
                on_cluster.forward_if_asked(self, ctx, typed, script, values)
        all_params, untyped = (
            self.params,
            [each for each in self.params if each not in order and _has_default(each)],
        )
        self.params = [each for each in all_params if each not in untyped]
        try:
            with plugins_disabled():  # typer converts values with pydantic
                rest = super().parse_args(ctx, args)
        finally:
            self.params = all_params
        ctx.params.update({str(each.name): _default_of(each, ctx) for each in untyped})
        _reject_two_names(typed, order)
        ctx.meta[TYPED] = frozenset(word.partition("=")[0] for word in typed)
        return rest

    def _lacks_argument(self, values: dict[str, Any]) -> bool:
        return any(
            _is_argument(each) and each.required and not values.get(str(each.name))
            for each in self.params
        )

    def _has_options_after_run(self, script: list[str]) -> bool:
        """Return whether what would be a script and its arguments is a run and options of this command."""
        names_a_run = getattr(self.callback, "names_a_run", None)
        own = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        return bool(
            names_a_run
            and script[1:]
            and script[1].partition("=")[0] in own
            and names_a_run(script[0])
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [
            self.options_metavar or "",
            *(_usage(each) for each in self.get_params(ctx) if _is_argument(each)),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            **{name: [] for name in TABLE},
            GENERAL: [],
        }
        for param in self.get_params(ctx):
            if _is_argument(param):
                groups["Arguments"].append(
                    (param.metavar or str(param.name), getattr(param, "help", None) or "")
                )
            elif record := param.get_help_record(ctx):
                group = getattr(param, "rich_help_panel", None) or GENERAL
                groups.setdefault(group, []).append((_flags(record[0]), record[1]))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        whole = self.epilog
        self.epilog = whole and "\n".join(
            _wrap_example(line, formatter.width - 2) for line in whole.splitlines()
        )
        super().format_epilog(ctx, formatter)
        self.epilog = whole


def _wrap_example(line: str, width: int) -> str:
    """Wrap what an example says in its own column, or below the command if there is no room."""
    match = _EXAMPLE.fullmatch(line)
    if len(line) <= width or match is None:
        return line
    command, text = match.groups()
    beside = width - len(command) >= NARROWEST
    column = len(command) if beside else 8
    lines = textwrap.wrap(text, width - column)
    first = f"{command}{lines.pop(0)}" if beside else command.rstrip()
    return "\n".join([first, *(f"{'':<{column}}{each}" for each in lines)])


def _reject_two_names(typed: list[str], order: list[Any]) -> None:
    """Raise if an option is given under two of its names: only the last value would count."""
    words = {word.partition("=")[0] for word in typed}
    for param in order:
        names = [name for name in param.opts if name in words]
        if order.count(param) > 1 and len(names) > 1 and not getattr(param, "multiple", False):
            raise UsageError(
                f"{' and '.join(names)} are two names for the same option.",
                hint="Use only one of them.",
            )


def _reject_two_clusters(order: list[Any]) -> None:
    if sum(each.name == "on" for each in order) > 1:
        raise UsageError(
            "--on is given twice.", hint="Name one cluster, or several as in --on alps,cedar."
        )


def _default_of(param: Any, ctx: Any) -> Any:
    """Return a parameter's default. Older versions of typer expect an empty tuple for a list without one."""
    default = param.get_default(ctx)
    return (
        ()
        if default is None and (param.nargs == -1 or getattr(param, "multiple", False))
        else default
    )


def _has_default(param: Any) -> bool:
    """Return whether an option that was not typed is simply its default, which needs no conversion."""
    special = param.required or param.callback or param.envvar or getattr(param, "prompt", None)
    return not (_is_argument(param) or special or not param.expose_value) and param.default in (
        None,
        False,
    )


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _usage(argument: Any) -> str:
    """Write an argument as `NAME`, `NAME...` or `[NAME]`. A metavar with brackets says it all."""
    name = str(argument.metavar or argument.name)
    if "[" in name:
        return name
    name = f"{name}..." if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _flags(text: str) -> str:
    """Write a switch as `--[no-]name`, and a value without a metavar as N or the option's own name."""
    text = _SWITCH.sub(r"--[no-]\1", text)
    return _TYPE.sub(
        lambda match: f"{match[1]} {'N' if match[2] == 'int' else match[1].upper()}", text
    )
