"""Files of secrets, read when a run is started: those that only their owner can read, and no others."""

from __future__ import annotations

import netrc
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.cluster.checks.finding import GOOD, PROBLEM, Finding
from paceline.cluster.secrets.dotenv import parse_dotenv
from paceline.errors import EnvironmentProblem, PacelineError, SpecError
from paceline.plan.quote import quote
from paceline.plan.secrets import IN_THE_SHELL, Secrets, choose_secrets
from paceline.spec import Job

WANDB_KEY = "WANDB_API_KEY"
WANDB_BASE_URL = "WANDB_BASE_URL"
CREDENTIALS = "wandb_credentials.txt"
NETRCS = (".netrc", "_netrc")

Values = dict[str, str]
Read = Callable[[str, "_Reading"], Values]


@dataclass(frozen=True)
class _Reading:
    """A file that is being read, and what is known so far."""

    path: Path
    shown: str  # its name, for people
    known: Mapping[str, str]  # the environment, over it what files before this one said


def read_secrets(job: Job, environ: Mapping[str, str]) -> Secrets:
    """Read the secret files. If two set the same variable, the first in the order of `secret_files` wins."""
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for path in secret_files(job, environ):
        kind = _kind(path, environ)
        known = {**environ, **job.environment.variables, **values}
        if kind.only_for is not None and kind.only_for in known:
            continue  # the file is not needed: its mode is nobody's business here
        shown = show_path(path, job, environ)
        content = _read(path, shown, must_exist=job.environment.secret_files is not None)
        if content is None:
            continue
        found = kind.read(content.text, _Reading(path, shown, known))
        if found:
            _refuse_open(path, shown, content.mode)
        for name, value in found.items():
            values.setdefault(name, value)
            sources.setdefault(name, shown)
    # By itself, whichever files are read: a shell that has a key for W&B is one whose runs log there.
    if WANDB_KEY in environ and WANDB_KEY not in values:
        values[WANDB_KEY], sources[WANDB_KEY] = environ[WANDB_KEY], IN_THE_SHELL
    # A key is good for one server alone: which it is goes with it.
    if WANDB_BASE_URL in environ and (WANDB_KEY in values or WANDB_KEY in job.environment.variables):
        values.setdefault(WANDB_BASE_URL, environ[WANDB_BASE_URL])
        sources.setdefault(WANDB_BASE_URL, IN_THE_SHELL)
    return Secrets(values, sources)


def inspect_secrets(job: Job, environ: Mapping[str, str]) -> Finding:
    """What a run started here would be given, by name."""
    try:
        found = choose_secrets(job, environ=environ, filed=read_secrets(job, environ), in_a_job=False)
    except PacelineError as problem:
        return Finding("secrets", PROBLEM, problem.message, problem.hint)
    return Finding("secrets", GOOD, found.told() or "none")


def secret_files(job: Job, environ: Mapping[str, str]) -> list[Path]:
    """The files to read, whether they exist or not: those that were asked for, else the usual ones."""
    if job.environment.secret_files is None:
        return default_secret_files(job, environ)
    home = environ.get("HOME", "~")
    asked = (home + name[1:] if name.startswith("~/") else name for name in job.environment.secret_files)
    return [Path(os.path.abspath(job.folder / name)) for name in asked]


def default_secret_files(job: Job, environ: Mapping[str, str]) -> list[Path]:
    """The project's own first, then what the user has for all projects, then what wandb knows of."""
    found = [job.folder / ".env"]
    home = environ.get("HOME")
    config = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    if config:
        found.append(Path(config) / "paceline" / "secrets.env")
    if home:
        found.append(Path(home) / CREDENTIALS)
    if environ.get("NETRC"):
        found.append(Path(environ["NETRC"]))
    elif home:
        found += [Path(home) / name for name in NETRCS]
    return found


def show_path(path: Path, job: Job, environ: Mapping[str, str]) -> str:
    """A path as people write it: within the project, below ~, or in full."""
    for folder, prefix in ((job.folder, ""), (Path(environ.get("HOME") or "/"), "~/")):
        if folder != Path("/") and path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return str(path)


@dataclass(frozen=True)
class _Content:
    text: str
    mode: int


def _read(path: Path, shown: str, *, must_exist: bool) -> _Content | None:
    """A file's text and mode; None where there is none."""
    try:
        # Not blocking: what stands there may be a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise SpecError(
                f"there is no file {shown}, which secret_files in [environment] names",
                hint="write it (and chmod 600 it), or take it out of secret_files",
            ) from None
        return None
    except OSError as problem:
        raise _cannot(shown, problem.strerror or "") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode) and not must_exist:
            return None  # a virtual environment may be called `.env`
        if not stat.S_ISREG(mode):
            raise _cannot(shown, "it is no file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(descriptor)
    try:
        return _Content(content.decode("utf-8"), stat.S_IMODE(mode))
    except UnicodeDecodeError:
        raise _cannot(shown, "it is no text in UTF-8") from None


def _refuse_open(path: Path, shown: str, mode: int) -> None:
    """What others can read is no secret, and should not become one that many runs rely on."""
    if os.name == "posix" and mode & 0o077:
        raise EnvironmentProblem(
            f"{shown} holds secrets and is open to others: its mode is {mode:04o}, expected 0600",
            hint=f"chmod 600 {quote(str(path))}",
        )


def _cannot(shown: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the secrets in {shown} cannot be read: {why}",
        hint="mend it, or say in secret_files of [environment] which files are read ([] for none)",
    )


# -- kinds of files --------------------------------------------------------------------------------------


def _dotenv(text: str, reading: _Reading) -> Values:
    return parse_dotenv(text, where=reading.shown)


def _credentials(text: str, reading: _Reading) -> Values:
    """A bare key, or lines such as WANDB_API_KEY=..."""
    words = text.split()
    if len(words) == 1 and "=" not in words[0].rstrip("="):
        return {WANDB_KEY: words[0]}
    return parse_dotenv(text, where=reading.shown)


def _netrc(text: str, reading: _Reading) -> Values:
    """The password for wandb's server. A key for one server is never given to another."""
    from paceline.contract.wandb_server import base_url

    host = urlsplit(base_url(reading.known)).hostname or ""
    try:
        machine = netrc.netrc(str(reading.path)).hosts.get(host)
    except netrc.NetrcParseError as problem:  # its message may hold the password
        if host not in text:
            return {}  # other programs may read it otherwise, and nothing in it is for us
        raise _cannot(reading.shown, f"line {problem.lineno} is not of a .netrc") from None
    return {WANDB_KEY: machine[2]} if machine and machine[2] else {}


@dataclass(frozen=True)
class _Kind:
    read: Read
    only_for: str | None = None  # the one variable that it is read for, if nothing else has it


_NETRC = _Kind(_netrc, only_for=WANDB_KEY)
# By a file's name; any other holds lines of NAME=value.
_KINDS = {CREDENTIALS: _Kind(_credentials, only_for=WANDB_KEY), **dict.fromkeys(NETRCS, _NETRC)}


def _kind(path: Path, environ: Mapping[str, str]) -> _Kind:
    if str(path) == environ.get("NETRC"):
        return _NETRC
    return _KINDS.get(path.name, _Kind(_dotenv))
