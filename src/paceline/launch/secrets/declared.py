"""The secrets of a run: which there are, and which value is used. Values go to `environment.sh` or
to agents alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.contract import env
from paceline.contract.redaction import REDACTED, redact
from paceline.errors import SpecError
from paceline.spec.job import Job

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


def received_secrets() -> Secrets | None:
    """Return the secrets that came with the command; None if it was typed on this machine."""
    return _received[0] if _received else None


def choose_secrets(
    job: Job, *, environ: Mapping[str, str], file_secrets: Secrets, in_a_job: bool = True
) -> Secrets:
    """Return the secrets from files, and those that `secrets` and `[notify] webhook` name; what is
    set here wins.

    `in_a_job`: a batch script carries them, and one that is named but found nowhere is an error.
    """
    values, sources = {}, {}
    for name, value in file_secrets.values.items():
        if name in _OF_BASH or env.is_owned(name):
            continue
        _check_name(name, f"{file_secrets.sources[name]} sets", script=in_a_job)
        from_shell = name in environ
        values[name] = environ[name] if from_shell else value
        sources[name] = FROM_SHELL if from_shell else file_secrets.sources[name]
    for name, key in _named(job).items():
        _check_name(name, f"{job.source(key)} names", script=in_a_job)
        if name in values:
            continue
        if name in environ:
            values[name], sources[name] = environ[name], FROM_SHELL
        elif in_a_job:
            raise _missing(job, name, key)
    return Secrets(values, sources)


def note_missing(job: Job, found: Secrets) -> list[str]:
    """Return a note on each secret that a file names and that is set nowhere; raise for one that
    was typed.
    """
    notes = []
    for name, key in _named(job).items():
        if name in found.values or name in job.environment.variables:
            continue
        if job.is_typed(key):
            raise _missing(job, name, key)
        notes.append(f"{job.source(key)} names {name}, which is not set here")
    return notes


def _named(job: Job) -> dict[str, str]:
    """Return the secrets that are named, without a value, and the key that names each."""
    named = dict.fromkeys(job.environment.secrets, "environment.secrets")
    if job.notify.webhook is not None:
        named.setdefault(job.notify.webhook, "notify.webhook")
    return named


def _missing(job: Job, name: str, key: str) -> SpecError:
    return SpecError(
        f"{job.source(key)} names {name}, which is not set here or in a secrets file.",
        hint=f"Export {name} first, write it to ~/.config/paceline/secrets.env, or remove it.",
    )


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
