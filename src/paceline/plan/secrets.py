"""Secrets of a run: which there are, and which value counts. Values go to `environment.sh` or to agents alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import SpecError
from paceline.plan.run_record import HIDDEN, hide
from paceline.spec import Job

IN_THE_SHELL = "your environment"

# Variables of a batch script and of job.sh.
SCRIPT_NAMES = {
    "run", "python", "sweep", "submission", "engine", "options", "folder", "job", "job_start", "owner", "option",
    "requeue", "resubmit", "exclude", "terminated", "interrupted", "mpirun_pid", "port", "forward", "name", "verdict",
    "nodes", "pause", "kept", "id", "next", "list", "trials", "trial", "index", "line", "slot", "slots", "code",
    "again", "files",
}  # fmt: skip

# Bash would stop at an assignment to them. Files for other programs hold some (UID), and nobody's secret is one.
_READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}


@dataclass(frozen=True)
class Secrets:
    """Values by name, and where each was found. Its text form names them, and tells no value."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the names for people: `HF_TOKEN (.env), WANDB_API_KEY (~/.netrc)`."""
        return ", ".join(f"{name} ({self.sources[name]})" for name in sorted(self.values))


NO_SECRETS = Secrets()


def choose_secrets(job: Job, *, environ: Mapping[str, str], filed: Secrets, in_a_job: bool = True) -> Secrets:
    """Those of the files and those that `[environment] secrets` names; a variable that is set here wins over files.

    `in_a_job`: a batch script carries them, and one that is named and found nowhere is an error: the job would lack it.
    """
    values, sources = {}, {}
    for name, value in filed.values.items():
        if name in _READ_ONLY:
            continue
        _refuse_unfit(name, f"{filed.sources[name]} sets", script=in_a_job)
        from_shell = name in environ
        values[name] = environ[name] if from_shell else value
        sources[name] = IN_THE_SHELL if from_shell else filed.sources[name]
    for name in job.environment.secrets:
        _refuse_unfit(name, f"{job.source('environment.secrets')} names", script=in_a_job)
        if name in values:
            continue
        if name in environ:
            values[name], sources[name] = environ[name], IN_THE_SHELL
        elif in_a_job:
            raise SpecError(
                f"{job.source('environment.secrets')} names {name}, which is not set here or in a secrets file",
                hint=f"export {name} before you submit, write it into ~/.config/paceline/secrets.env, or take it out",
            )
    return Secrets(values, sources)


def _refuse_unfit(name: str, who: str, *, script: bool) -> None:
    if not (name.isidentifier() and name.isascii()):
        # Whoever wrote a value there must not find it in a log.
        raise SpecError(
            f"{who} {name.partition('=')[0]!r}, which is no name of a variable",
            hint="write names alone there; values stand in your environment or in a file of secrets",
        )
    if script and name in SCRIPT_NAMES:
        raise SpecError(f"{who} {name}, which a batch script cannot carry", hint="give it another name")


def plain_variables(job: Job) -> dict[str, str]:
    """`--env` and `[environment] variables` without those whose name says that they are secrets."""
    return {name: text for name, text in job.environment.variables.items() if hide(name, text) != HIDDEN}


def hidden_variables(job: Job) -> dict[str, str]:
    """The others: they go the way of secrets."""
    return {name: text for name, text in job.environment.variables.items() if hide(name, text) == HIDDEN}
