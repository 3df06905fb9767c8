"""What each command with `--on` sends to the cluster, besides its own line and paceline.toml.

A command that is not in `PAYLOADS` sends nothing else: commands that only read need neither code nor secrets there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]  # what was typed, by parameter


@dataclass(frozen=True)
class Payload:
    code: bool = False
    secrets: bool = False  # with their values
    secret_names: bool = False  # a check or a dry run shows them; the values stay here


NOTHING = Payload()


def _submit(values: Values) -> Payload:
    # A run that is resumed has its code there already, unless a script is named.
    return _start(values, code=not values.get("resume") or bool(values.get("args")))


def _sweep(values: Values) -> Payload:
    # Anything else is the name of a sweep, whose code is there.
    return _start(values, code=os.path.isfile(str(values.get("file"))))


def _start(values: Values, *, code: bool) -> Payload:
    is_shown = bool(values.get("dry_run"))
    return Payload(code=code, secrets=not is_shown, secret_names=is_shown)


def _doctor(values: Values) -> Payload:
    from paceline.cli.commands.doctor import is_about_run

    args, is_job, is_module = (
        values.get("args"),
        bool(values.get("is_job")),
        bool(values.get("module")),
    )
    if is_about_run(args, is_job=is_job, is_module=is_module):
        return NOTHING
    return Payload(code=is_job or bool(args), secret_names=True)


def _shell(values: Values) -> Payload:
    return Payload(code=values.get("run") is None)  # a new allocation begins in the project


# By the key of a command: its module, and the subcommand if a module has several.
PAYLOADS: dict[str, Callable[[Values], Payload]] = {
    "submit": _submit,
    "sweep": _sweep,
    "doctor": _doctor,
    "shell": _shell,
    "env_build": lambda values: Payload(code=True),
}


def payload_of(key: str, values: Values) -> Payload:
    return PAYLOADS[key](values) if key in PAYLOADS else NOTHING
