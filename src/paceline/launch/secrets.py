"""The secrets of a run: which there are, where they are read, and which value is used.

Values go to `environment.sh` or to agents alone. Files that others can read are rejected.
"""

from __future__ import annotations

import netrc
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from paceline.contract import env
from paceline.contract.redaction import REDACTED, redact
from paceline.errors import EnvironmentProblem, PacelineError, SpecError
from paceline.spec.findings import GOOD, PROBLEM, Finding
from paceline.spec.job import Job
from paceline.spec.shell_text import quote

FROM_SHELL = "your environment"

# Every variable of a batch script and of stop_and_requeue.sh begins so.
SCRIPT_PREFIX = "paceline_"

# Bash would stop at an assignment to the first of these, and run the script differently with the
# others. Files for other programs set some (UID), and none is anybody's secret.
_OF_BASH = {
    "BASHOPTS",
    "BASH_VERSINFO",
    "EUID",
    "PPID",
    "SHELLOPTS",
    "UID",
    "BASH_COMPAT",
    "BASH_ENV",
    "ENV",
    "EXECIGNORE",
    "GLOBIGNORE",
    "IFS",
    "POSIXLY_CORRECT",
}


def belongs_to_script(name: str) -> bool:
    """Return whether a batch script itself relies on a variable, so that no file may set it."""
    return name in _OF_BASH or name.startswith(SCRIPT_PREFIX) or env.is_owned(name)


@dataclass(frozen=True)
class Secrets:
    """Values by name, and where each was found. Its text form shows no value."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the names for people: `HF_TOKEN (.env), WANDB_API_KEY (~/.netrc)`."""
        return ", ".join(f"{name} ({self.sources[name]})" for name in sorted(self.values))


NO_SECRETS = Secrets()

# What came over a connection with the command that this process carries out. It is in memory only.
_received: list[Secrets] = []


def keep_received(values: Mapping[str, str], sources: Mapping[str, str]) -> None:
    _received[:] = [Secrets(dict(values), dict(sources))]


def choose_secrets(
    job: Job, *, environ: Mapping[str, str], file_secrets: Secrets, in_a_job: bool = True
) -> Secrets:
    """Return the secrets from files, and those that `secrets` and `[notify] webhook` name; what is
    set here wins.

    `in_a_job`: a batch script carries them. One that is named but found nowhere is an error there,
    and everywhere if it was typed.
    """
    # without a value, and the key that names each
    named = dict.fromkeys(filter(None, [job.tables.notify.webhook]), "notify.webhook")
    named |= dict.fromkeys(job.environment.secrets, "environment.secrets")
    origins = {name: f"{source} sets" for name, source in file_secrets.sources.items()}
    origins |= {name: f"{job.source(key)} names" for name, key in named.items()}
    values, sources = {}, {}
    for name, origin in origins.items():
        if name not in named and (name in _OF_BASH or env.is_owned(name)):
            continue
        _check_name(name, origin, script=in_a_job)
        if name in environ:
            values[name], sources[name] = environ[name], FROM_SHELL
        elif name in file_secrets.values:
            values[name], sources[name] = file_secrets.values[name], file_secrets.sources[name]
        elif in_a_job or job.is_typed(named[name]):
            raise SpecError(
                f"{origin} {name}, which is not set here or in a secrets file.",
                hint=f"Export {name} first, write it to ~/.config/paceline/secrets.env, or "
                "remove it.",
            )
    return Secrets(values, sources)


def _check_name(name: str, source: str, *, script: bool) -> None:
    if not (name.isidentifier() and name.isascii()):
        # Whoever wrote a value there must not find it in a log.
        raise SpecError(
            f"{source} {name.partition('=')[0]!r}, which is not a variable name.",
            hint="List names only; keep values in your environment or in a secrets file.",
        )
    if script and belongs_to_script(name):
        raise SpecError(
            f"{source} {name}, a name that batch scripts use themselves.", hint="Rename it."
        )


def plain_variables(job: Job) -> dict[str, str]:
    """Return `--env` and `[environment] variables` without those that look like secrets."""
    return {
        name: text
        for name, text in job.environment.variables.items()
        if redact(name, text) != REDACTED
    }


def hidden_variables(job: Job) -> dict[str, str]:
    """Return the others, which are treated as secrets."""
    return {
        name: text
        for name, text in job.environment.variables.items()
        if redact(name, text) == REDACTED
    }


# -- reading the files


WANDB_KEY = "WANDB_API_KEY"
WANDB_BASE_URL = "WANDB_BASE_URL"
NETRCS = (".netrc", "_netrc")


def read_secrets(job: Job, environ: Mapping[str, str]) -> Secrets:
    """Read the secret files. If two set the same variable, the first in the order of
    `secret_files` wins.
    """
    named = job.environment.secret_files is not None
    received = _received[0] if _received else NO_SECRETS
    values, sources = dict(received.values), dict(received.sources)
    # Where a command came from, the files that the job names were read.
    paths = [] if named and _received else secret_files(job, environ)
    for path in paths:
        known = {**environ, **job.environment.variables, **values}
        is_netrc = path.name in NETRCS or str(path) == environ.get("NETRC")
        if is_netrc and WANDB_KEY in known:
            continue  # the file is not needed, so its mode does not matter
        label = show_path(path, job, environ)
        if named and not path.exists():
            raise SpecError(
                f"{job.source('environment.secret_files')} names {label}, which does not exist.",
                hint="Create it (with chmod 600), or correct the path.",
            )
        # a virtual environment may be called `.env`
        if not path.exists() or (path.is_dir() and not named):
            continue
        text, mode = _read(path, label)
        if is_netrc:
            found = _parse_netrc(path, text, label, known)
        else:
            found = parse_dotenv(text, where=label)
        if found and os.name == "posix" and mode & 0o077:  # its secrets may already be known
            raise EnvironmentProblem(
                f"{label} contains secrets, but others can read it: its mode is {mode:04o}, "
                "expected 0600.",
                hint=f"Run: chmod 600 {quote(str(path))}",
            )
        for name, value in found.items():
            values.setdefault(name, value)
            sources.setdefault(name, label)
    # Taken from the shell whichever files are read: a user with a W&B key wants W&B. A key is valid
    # for one server only, so the server's address goes with it.
    for name in (WANDB_KEY, WANDB_BASE_URL):
        has_key = WANDB_KEY in {**values, **job.environment.variables}
        if name in environ and name not in values and (has_key or name == WANDB_KEY):
            values[name], sources[name] = environ[name], FROM_SHELL
    return Secrets(values, sources)


def inspect_secrets(job: Job, environ: Mapping[str, str]) -> Finding:
    """Return the names of the secrets that a run started here would get."""
    try:
        found = choose_secrets(
            job, environ=environ, file_secrets=read_secrets(job, environ), in_a_job=False
        )
    except PacelineError as problem:
        return Finding("secrets", PROBLEM, problem.message, problem.hint)
    return Finding("secrets", GOOD, found.describe() or "none")


def secret_files(job: Job, environ: Mapping[str, str]) -> list[Path]:
    """Return the files to read, existing or not: `secret_files` of the job; or the project's own
    file, then the user's, then the one where `wandb login` leaves its key.
    """
    home = environ.get("HOME", "~")
    names = job.environment.secret_files
    if names is None:
        config = environ.get("XDG_CONFIG_HOME") or "~/.config"
        netrcs = [environ["NETRC"]] if environ.get("NETRC") else [f"~/{name}" for name in NETRCS]
        names = (".env", f"{config}/paceline/secrets.env", *netrcs)
    full = (home + name[1:] if name.startswith("~/") else name for name in names)
    return [Path(os.path.abspath(job.folder / name)) for name in full]


def show_path(path: Path, job: Job, environ: Mapping[str, str]) -> str:
    """Return a path as a user would write it: relative to the project or ~, or absolute."""
    for folder, prefix in ((job.folder, ""), (Path(environ.get("HOME") or "/"), "~/")):
        if folder != Path("/") and path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return str(path)


def _read(path: Path, label: str) -> tuple[str, int]:
    """Return a file's text and mode."""
    if not path.is_file():  # a pipe would be waited for
        raise _read_error(label, "it is not a regular file")
    try:
        return path.read_text(encoding="utf-8-sig"), stat.S_IMODE(path.stat().st_mode)
    except UnicodeDecodeError:
        raise _read_error(label, "it is not UTF-8 text") from None
    except OSError as problem:
        raise _read_error(label, problem.strerror or "") from None


def _read_error(label: str, reason: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"Cannot read the secrets in {label}: {reason}.",
        hint="Fix the file, or list the files to read in secret_files of [environment] ([] for "
        "none).",
    )


def _parse_netrc(path: Path, text: str, label: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the password for wandb's server. A key for one server is never sent to another."""
    from paceline.contract.wandb_server import base_url

    host = urlsplit(base_url(known)).hostname or ""
    try:
        machine = netrc.netrc(str(path)).hosts.get(host)
    except netrc.NetrcParseError as problem:  # its message may contain the password
        if host not in text:
            return {}  # other programs may be able to parse it, and nothing in it is for us
        raise _read_error(label, f"line {problem.lineno} is not valid in a .netrc") from None
    return {WANDB_KEY: machine[2]} if machine and machine[2] else {}


# One entry: its name, and its value in single quotes, in double quotes, or bare up to a comment.
_ENTRY = re.compile(
    r"""[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?: '(?P<single>[^']*)'
      | "(?P<double>(?:[^"\\]|\\.)*)"
      | (?![ \t'"])(?P<bare>(?:(?!\#)(?:[^\n#]|(?<![ \t])\#)*)?))
    [ \t]*(?:\#[^\n]*)?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_BLANK = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$", "`": "`", "\n": ""}
# Other parsers would expand these. They are allowed in single quotes, or escaped (`\$`) in double
# quotes.
_EXPANSION = re.compile(r"\$[({]|`")


def parse_dotenv(text: str, *, where: str) -> dict[str, str]:
    """Return the variables; later lines win. Comments, `export` and quotes (also multi-line) are
    allowed.

    In double quotes \\n, \\t, \\r, \\\\, \\", \\$ and \\` are escapes. Nothing is expanded:
    `${NAME}` is an error.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
            continue
        line = text.count("\n", 0, position) + 1
        entry = _ENTRY.match(text, position)
        if entry is None or "\0" in entry[0]:
            raise SpecError(
                f"Line {line} of {where} is not of the form NAME=value, with each quote closed.",
                hint="Write NAME=value, NAME='value' or # a comment. secret_files in [environment] "
                "lists the files to read.",
            )
        position = entry.end()
        value, double = entry["single"], entry["double"]
        plain = entry["bare"] if double is None else re.sub(r"\\.", "", double, flags=re.DOTALL)
        if value is None and _EXPANSION.search(plain):
            raise SpecError(
                f"Line {line} of {where} contains ${{...}}, $(...) or a backquote, which Paceline "
                "does not expand.",
                hint="Put the value in single quotes to use it literally, or write it out.",
            )
        if double is not None:
            value = re.sub(
                r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), double, flags=re.DOTALL
            )
        found[entry[1]] = entry["bare"].strip() if value is None else value
    return found
