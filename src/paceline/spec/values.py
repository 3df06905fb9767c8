"""What values of `paceline.toml` look like: each kind with its validation."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from paceline.contract.env import is_owned
from paceline.contract.process import DEFAULT_WARM
from paceline.contract.redaction import redact_text
from paceline.spec.quantities import (
    parse_mebibytes,
    parse_seconds,
    parse_time_limit,
    slurm_size,
    slurm_time,
)

Style = Literal["fork", "srun", "torchrun", "spawn", "mpirun", "lightning", "accelerate"]
# what notifications may be about
Event = Literal["done", "failed", "stopped", "requeued", "stalled"]

# The text of each ValueError completes "Invalid KEY VALUE: use ...".


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _variables(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError('a table, e.g. { NAME = "value" }')
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"letters, digits and _ in the name of a variable, not {name!r}")
        if is_owned(str(name)):
            raise ValueError(f"other names: {name} is reserved for Paceline")
        is_text = isinstance(text, str) and "\0" not in text
        if isinstance(text, bool) or not (is_text or isinstance(text, (int, float))):
            raise ValueError(f"a string without NUL characters or a number for {name}")
    return {name: str(text) for name, text in value.items()}


def _expand_home(value: str) -> str:
    """Expand `~/` as a shell would: no shell sees these values."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _warm(value: object) -> object:
    """Return for how many seconds a process stays; a switch turns it on and off."""
    try:
        return DEFAULT_WARM * value if isinstance(value, bool) else parse_seconds(value)
    except ValueError:
        raise ValueError('true, false or a duration such as "10m"') from None


def _no_secret(value: str) -> str:
    if redact_text(value) != value:
        raise ValueError("a command without secrets: set them in .env, and write $NAME")
    return value


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a rule for texts."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


_FOLDER_NAME = "a folder name: letters, digits, spaces and any of . _ - + = @ ,"
_VARIABLE_NAME = (
    "the name of a variable that holds the address, e.g. SLACK_WEBHOOK, and set that in .env"
)
_HOST_NAME = "a name of ~/.ssh/config, or user@host, e.g. login.example.org"
# ssh would take a leading dash as an option
HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\]-]*"
Seconds = Annotated[int, BeforeValidator(parse_seconds)]
Grace = Annotated[Seconds, Field(ge=1, le=65_535)]  # Slurm stores it in 16 bits
Warm = Annotated[bool | int, BeforeValidator(_warm)]
# Written to run.json with their units, as these need one when they are read again.
TimeLimit = Annotated[
    int, BeforeValidator(parse_time_limit), PlainSerializer(slurm_time, when_used="json")
]
Mebibytes = Annotated[
    int, BeforeValidator(parse_mebibytes), PlainSerializer(slurm_size, when_used="json")
]
# Not strict: a list of TOML becomes a tuple.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
StringOrList = Annotated[Strings, BeforeValidator(_listed)]
Events = Annotated[tuple[Event, ...], Field(strict=False), BeforeValidator(_listed)]
Variables = Annotated[dict[str, str], BeforeValidator(_variables)]
FolderName = Annotated[str, _matching(r"\w[\w .+@=,-]*", _FOLDER_NAME)]
Line = Annotated[str, _matching(r"[^\n\0]*[^\s\0][^\n\0]*", "one line of text, not a blank one")]
Text = Annotated[str, _matching(r"[^\0]*[^\s\0][^\0]*", "text that is not blank")]
Host = Annotated[str, _matching(HOST, _HOST_NAME)]
RunName = Annotated[Line, _matching("[^-].*", "a name that does not begin with a dash")]
UserPath = Annotated[Line, AfterValidator(_expand_home)]
UserPaths = Annotated[tuple[UserPath, ...], Field(strict=False)]
Requeue = bool | Literal["always"]
StopSignal = Literal["SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP"]  # SIGUSR2 writes stacks
Command = Annotated[Line, AfterValidator(_no_secret)]
VariableName = Annotated[Line, _matching("[A-Za-z_][A-Za-z0-9_]*", _VARIABLE_NAME)]
Natural = Annotated[int, Field(ge=0)]
ExitCode = Annotated[int, Field(ge=0, le=255)]
Gpus = Annotated[int, Field(ge=0, le=1024)]
Count = Annotated[int, Field(ge=1)]
Nodes = Annotated[int, Field(ge=1, le=65_536)]
PerNode = Annotated[int, Field(ge=1, le=4096)]  # ranks or cores: Slurm stores them in 16 bits


class Table(BaseModel):
    """A table of a file, frozen once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
