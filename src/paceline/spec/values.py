"""What values of `paceline.toml` look like: each kind with its validation."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from paceline.contract.env import MAX_BYTES, is_owned, is_too_large
from paceline.contract.process import DEFAULT_WARM
from paceline.contract.redaction import redact_text
from paceline.spec.quantities import (
    parse_mebibytes,
    parse_seconds,
    parse_time_limit,
    slurm_size,
    slurm_time,
)

MAX_GRACE = 65_535  # seconds; Slurm stores this in 16 bits
# that ask a script to stop; SIGUSR2 writes stacks
SIGNALS = ("SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP")
# that notifications may be about
EVENTS = ("done", "failed", "stopped", "requeued", "stalled", "gpu_idle")
Style = Literal["fork", "srun", "torchrun", "spawn", "mpirun", "lightning", "accelerate"]

# The text of each ValueError completes "Invalid KEY VALUE: use ...".


def _strings(value: object) -> object:
    """Turn a TOML array into a tuple, so that the table stays frozen."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError('a list of strings, e.g. ["one", "two"]')
    return tuple(value)


def _string_or_list(value: object) -> object:
    return _strings([value] if isinstance(value, str) else value)


def _variables(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError('a table, e.g. { NAME = "value" }')
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"letters, digits and _ in the name of a variable, not {name!r}")
        if is_owned(str(name)):
            raise ValueError(f"other names: {name} is reserved for Paceline")
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise ValueError(f"a string or a number for {name}")
        if "\0" in str(text):
            raise ValueError(f"a string without NUL characters for {name}")
        if is_too_large(str(name), str(text)):
            raise ValueError(
                f"at most {MAX_BYTES:,} bytes for {name}; put the value into a file and pass its "
                "path"
            )
    return {name: str(text) for name, text in value.items()}


def _step_range(value: str) -> str:
    match = re.fullmatch(r"(\d+):(\d+)", value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("steps as first:end, e.g. 10:13")
    return value


def _expand_home(value: str) -> str:
    """Expand `~/` as a shell would: no shell sees these values."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _warm(value: object) -> object:
    """Return for how many seconds a process stays; a switch turns it on and off."""
    try:
        return DEFAULT_WARM * value if isinstance(value, bool) else parse_seconds(value)
    except ValueError:
        raise ValueError('true, false or a duration such as "10m"') from None


def _requeue(value: object) -> object:
    if not isinstance(value, bool) and value != "always":
        raise ValueError('true, false or "always"')
    return value


def _stop_signal(value: object) -> object:
    name = value.upper() if isinstance(value, str) else ""
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in SIGNALS:
        raise ValueError(f"{', '.join(SIGNALS[:-1])} or {SIGNALS[-1]}")
    return name


def _one_line(value: str) -> str:
    if not value.strip() or "\n" in value or "\0" in value:
        raise ValueError("one line of text" if value.strip() else "text that is not blank")
    return value


def _no_secret(value: str) -> str:
    if redact_text(value) != value:
        raise ValueError("a command without secrets: set them in .env, and write $NAME")
    return value


def _events(value: object) -> object:
    found = _string_or_list(value)
    unknown = [each for each in found if each not in EVENTS] if isinstance(found, tuple) else []
    if unknown:
        raise ValueError(f"any of {', '.join(EVENTS)}")
    return found


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a rule for texts."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def _grace(value: object) -> int:
    seconds = parse_seconds(value)
    if not 1 <= seconds <= MAX_GRACE:
        raise ValueError(f"a duration from 1s to {MAX_GRACE}s: Slurm sends no signal earlier")
    return seconds


Seconds = Annotated[int, BeforeValidator(parse_seconds)]
Grace = Annotated[int, BeforeValidator(_grace)]
Warm = Annotated[bool | int, BeforeValidator(_warm)]
# Written to run.json with their units, as these need one when they are read again.
TimeLimit = Annotated[
    int, BeforeValidator(parse_time_limit), PlainSerializer(slurm_time, when_used="json")
]
Mebibytes = Annotated[
    int, BeforeValidator(parse_mebibytes), PlainSerializer(slurm_size, when_used="json")
]
Strings = Annotated[tuple[str, ...], BeforeValidator(_strings)]
StringOrList = Annotated[tuple[str, ...], BeforeValidator(_string_or_list)]
Variables = Annotated[dict[str, str], BeforeValidator(_variables)]
_FOLDER_NAME = "a folder name: letters, digits, spaces and any of . _ - + = @ ,"
_VARIABLE_NAME = (
    "the name of a variable that holds the address, e.g. SLACK_WEBHOOK, and set that in .env"
)
FolderName = Annotated[str, _matching(r"\w[\w .+@=,-]*", _FOLDER_NAME)]
Line = Annotated[str, AfterValidator(_one_line)]
RunName = Annotated[Line, _matching("[^-].*", "a name that does not begin with a dash")]
UserPath = Annotated[Line, AfterValidator(_expand_home)]
UserPaths = Annotated[Strings, AfterValidator(lambda paths: tuple(map(_expand_home, paths)))]
StepRange = Annotated[str, AfterValidator(_step_range)]
Requeue = Annotated[bool | Literal["always"], BeforeValidator(_requeue)]
StopSignal = Annotated[str, BeforeValidator(_stop_signal)]
Command = Annotated[Line, AfterValidator(_no_secret)]
VariableName = Annotated[Line, _matching("[A-Za-z_][A-Za-z0-9_]*", _VARIABLE_NAME)]
Events = Annotated[tuple[str, ...], BeforeValidator(_events)]
Natural = Annotated[int, Field(ge=0)]
ExitCode = Annotated[int, Field(ge=0, le=255)]
Gpus = Annotated[int, Field(ge=0, le=1024)]
Count = Annotated[int, Field(ge=1)]
Nodes = Annotated[int, Field(ge=1, le=65_536)]
PerNode = Annotated[int, Field(ge=1, le=4096)]  # ranks or cores: Slurm stores them in 16 bits


class Table(BaseModel):
    """A table of a file, frozen once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
