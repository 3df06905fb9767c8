"""The layout of `--help`: a description, the options in groups, and examples at the bottom."""

from __future__ import annotations

import inspect
import re
from typing import Any

from typer.core import TyperCommand

from paceline.spec.option_table import TABLE

GENERAL = "Options"
WIDTH = 110
_SWITCH = re.compile(r"--(\S+) / --no-\1$")


class GroupedCommand(TyperCommand):
    """A command whose options are grouped by their `rich_help_panel`.

    What follows `\\b` in the docstring is examples.
    """

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        text, mark, examples = inspect.cleandoc(help or "").partition("\b")
        settings = {"max_content_width": WIDTH, **(more.pop("context_settings", None) or {})}
        epilog = f"{mark}\nExamples:\n{examples.strip(chr(10))}" if examples else None
        super().__init__(*args, **{**more, "help": text.strip(), "epilog": epilog, "context_settings": settings})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{name: [] for name in TABLE}, GENERAL: []}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                groups["Arguments"].append((param.metavar or str(param.name), getattr(param, "help", None) or ""))
            elif record := param.get_help_record(ctx):
                group = getattr(param, "rich_help_panel", None) or GENERAL
                groups.setdefault(group, []).append((_SWITCH.sub(r"--[no-]\1", record[0]), record[1]))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
