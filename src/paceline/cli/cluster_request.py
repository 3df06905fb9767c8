"""What a command sends to a cluster: its line, the project's code, and secrets. Questions about them come first."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import console, runs
from paceline.contract import env
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import write_atomically
from paceline.errors import SpecError, UsageError
from paceline.launch.secrets import NO_SECRETS
from paceline.spec.home_path import state_folder
from paceline.spec.option import SWEEP
from paceline.spec.settings import TABLE, options_of
from paceline.spec.shell_text import quote

if TYPE_CHECKING:
    from paceline.cli.on_cluster import Forwarded
    from paceline.launch.secrets import Secrets
    from paceline.spec.clusters import Cluster, ProjectFile
    from paceline.spec.job import Job
    from paceline.ssh.code import Parcel
    from paceline.ssh.connection import Connection
    from paceline.ssh.remote_command import RemoteCommand

OPTIONS = {"env_build": "env"}  # the name in the table of options, if it is not the key
STARTS = ("submit", "sweep")
EXTRAS = re.compile(r"(.*?)(\[[\w., -]*\])")  # of a file, as in pyproject.toml[gpu]
PASSED_ON = ("NO_COLOR", "COLORTERM", "COLUMNS")  # variables of this terminal
CODE = "the code"  # in the list of what was sent, beside names of secrets


class FileName(str):
    """A word of a command line that names a file of this machine."""


def mark_file(word: str) -> str:
    """Return a word as a `FileName` if there is such a file, perhaps with extras."""
    return FileName(word) if os.path.isfile(word) or os.path.isfile(_without_extras(word)) else word


def _without_extras(word: str) -> str:
    match = EXTRAS.fullmatch(word)
    return match[1] if match and not os.path.exists(word) else word


def make_request(asked: Forwarded, project: ProjectFile) -> tuple[Connection, RemoteCommand]:
    """Return what to send to a cluster to carry out a command there. The connection is open."""
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.remote_command import RemoteCommand

    cluster = find_cluster(asked.names[0], project)
    connection = Connection(cluster)
    connection.require()
    job, needs_code = _load(asked, cluster), needs_its_code(asked)
    # a check or a dry run shows their names; the values stay here
    sends_values = asked.key in STARTS and not asked.values.get("dry_run")
    shows_names = asked.key in STARTS or (asked.key == "doctor" and not _is_about_run(asked))
    secrets = _secrets(job) if shows_names else NO_SECRETS
    parcel = _pack(asked, job, project, code=needs_code, secret_files={*secrets.sources.values()})
    line = [
        _name_there(word, job, parcel) if isinstance(word, FileName) else word
        for word in asked.line
    ]
    sent = secrets if sends_values else NO_SECRETS
    if (needs_code and parcel.code.files) or sent.values:
        _ask_first(cluster, parcel, sent, code=needs_code, yes=bool(asked.values.get("yes")))
    if not sends_values:
        secrets = replace(secrets, values=dict.fromkeys(secrets.values, ""))
    folder, variables = _relative(Path.cwd(), parcel.folder), _variables(cluster, parcel.folder)
    command = RemoteCommand(line, folder, parcel, variables, secrets.values, secrets.sources)
    return connection, command


def needs_its_code(asked: Forwarded) -> bool:
    """Return whether a command needs the project's code there, and not only its settings."""
    values, key = asked.values, asked.key
    if key == "submit":  # a run that is resumed has its code there, unless a script is named
        return not values.get("resume") or bool(values.get("args"))
    if key == "sweep":  # anything else is the name of a sweep, whose code is there
        return os.path.isfile(str(values.get("file")))
    if key == "doctor":
        return not _is_about_run(asked) and bool(values.get("is_job") or values.get("args"))
    # a new allocation begins in the project
    return key == "env_build" or (key == "shell" and values.get("run") is None)


def _is_about_run(asked: Forwarded) -> bool:
    from paceline.cli.commands.doctor import is_about_run

    values = asked.values
    is_job, is_module = bool(values.get("is_job")), bool(values.get("module"))
    return is_about_run(values.get("args"), is_job=is_job, is_module=is_module)


def _works_in_project(asked: Forwarded, job: Job) -> bool:
    """Whether the command starts a job in the project itself, rather than in a copy."""
    starts = asked.key in STARTS and not asked.values.get("dry_run")
    return starts and (job.project.workdir == "project" or not job.project.snapshot)


def _load(asked: Forwarded, cluster: Cluster) -> Job:
    """Load the job as far as this machine is concerned: which code and which secrets it has."""
    from paceline.cli.typer_options import Settings, find_program, this_cluster
    from paceline.spec.job import Program
    from paceline.spec.typed_flags import read_flags

    values, cwd = asked.values, Path.cwd()
    table = [
        option
        for _, option in options_of(OPTIONS.get(asked.key, asked.key))
        if option.key != "params"
    ]
    flags = read_flags([(option, values.get(option.parameter)) for option in table], os.environ)
    profile = values.get("cluster_profile") or (cluster.name if cluster.has_profile else "none")
    config = Path(values["config"]) if values.get("config") else None
    program = Program("")
    if asked.key == "submit" and values.get("args"):
        program = find_program(
            values["args"], is_module=bool(values.get("module")), cwd=cwd, command="submit"
        )
    own = {option.key for option in TABLE[SWEEP]}
    kept = [flag for flag in flags if flag.key not in own]
    job = Settings(tuple(kept), (), config, profile).load(program, cwd=cwd, here=True)
    file = values.get("file")
    if asked.key != "sweep" or not (isinstance(file, str) and os.path.isfile(file)):
        return job
    from paceline.sweep.settings import read_settings

    typed = [replace(flag, key=flag.key.split(".")[1]) for flag in flags if flag.key in own]
    found = read_settings(
        Path(file),
        typed=typed,
        flags=kept,
        config=config,
        profile=profile,
        cluster=this_cluster(here=True),
    )
    # with the secrets that its file names
    return replace(job, tables=found.job.tables, sources=found.job.sources)


def _pack(
    asked: Forwarded, job: Job, project: ProjectFile, *, code: bool, secret_files: Set[str]
) -> Parcel:
    """Return the project's code, or its settings alone. `secret_files` are those whose variables go another way."""
    from paceline.spec.load import repository_root
    from paceline.ssh.code import pack_code, pack_settings

    is_project = project.file is not None or repository_root(Path.cwd()) is not None
    names_code = asked.key in STARTS or asked.values.get("args") or asked.values.get("files")
    if not (code and (is_project or names_code)):
        return pack_settings(job.folder, project.file)
    try:
        runs_here = [runs.scratch_here()]
    except SpecError:  # it is named by variables of the cluster
        runs_here = []
    is_own = _works_in_project(asked, job)
    parcel = pack_code(job, os.environ, runs=runs_here, cluster=asked.names[0], is_own=is_own)
    if skipped := [each for each in parcel.skipped_secrets if each not in secret_files]:
        console.say_note(f"secrets left out of the code: {', '.join(skipped)}")
    named = [
        each.partition("=")[2] if re.match(r"-[^=]*=", each) else each for each in job.program.args
    ]
    if left := [each for each in named if _stays_here(each, job, parcel)]:
        send = f"paceline data push {quote(left[0])} --on {quote(asked.names[0])}"
        console.say_note(
            f"these are not sent, because git ignores them or they are outside the project: {', '.join(left)}."
            f" If {asked.names[0]} has no such data yet, send it with `{send}` and use the path that it prints."
        )
    return parcel


def _name_there(word: FileName, job: Job, parcel: Parcel) -> str:
    """Return how a command on the cluster finds a file of this machine: as it was typed, unless that leads elsewhere.

    A full path would name a file of the cluster's. Raises UsageError for a file that is not sent.
    """
    name = _without_extras(word)
    place = _place(job.cwd / name, parcel)
    target = _place(Path(os.path.realpath(job.cwd / name)), parcel)
    if target not in parcel.code.files:
        raise UsageError(
            f"{name} would not be sent: git ignores it, or it is outside the project {job.folder}.",
            hint="Only the project's code goes to the cluster: what git tracks, and new files that it does not ignore.",
        )
    folder = _relative(job.cwd, parcel.folder)
    inside = place if place in parcel.code.files else target
    if os.path.normpath(os.path.join(folder, name)) == inside:
        return str(word)
    there = os.path.relpath(inside, folder)
    return f"{'./' * there.startswith('-')}{there}{word.removeprefix(name)}"


def _place(path: Path, parcel: Parcel) -> str:
    """Return the name of a file in the project; it may be a link itself."""
    return os.path.relpath(
        os.path.join(os.path.realpath(path.parent), path.name), parcel.folder
    ).replace(os.sep, "/")


def _stays_here(name: str, job: Job, parcel: Parcel) -> bool:
    """Whether a name is a file or a folder here that is not sent."""
    path = job.cwd / name
    if not name or not os.path.lexists(path):
        return False
    inside = _place(path, parcel)
    files = parcel.code.files
    is_sent = inside in files or any(each.startswith(f"{inside}/") for each in files)
    return inside != "." and not is_sent


def _secrets(job: Job) -> Secrets:
    from paceline.launch.secrets import choose_secrets, read_secrets

    return choose_secrets(
        job, environ=os.environ, file_secrets=read_secrets(job, os.environ), in_a_job=False
    )


def _variables(cluster: Cluster, folder: Path) -> dict[str, str]:
    profile = {env.PROFILE: cluster.name} if cluster.has_profile else {}
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {env.ON_CLUSTER: cluster.name, env.LAPTOP_FOLDER: str(folder), **profile, **passed_on}


def _relative(cwd: Path, folder: Path) -> str:
    relative = os.path.relpath(cwd.resolve(), folder).replace(os.sep, "/")
    return "." if relative.startswith("..") else relative


# -- the question before something goes there


def _ask_first(
    cluster: Cluster, parcel: Parcel, secrets: Secrets, *, code: bool, yes: bool
) -> None:
    """Ask if the code or a secret goes there for the first time.

    Without a terminal, only say what goes there. Raises UsageError for a no.
    """
    key = f"{cluster.host}\0{parcel.folder}".encode(errors="surrogateescape")
    record = state_folder("sent") / f"{hashlib.sha256(key).hexdigest()[:16]}.json"
    try:
        known = {*map(str, read_object(record)["sent"])}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    new_code, new = code and CODE not in known, {*secrets.values} - known
    if new_code:
        console.say_note(
            f"{parcel.describe()} of {parcel.folder} will be sent to {cluster.name} for the first time"
        )
    if secrets.values:
        goes = "goes" if len(secrets.values) == 1 else "go"
        first = " for the first time" if new else ""
        console.say_note(f"{secrets.describe()} {goes} to {cluster.name}{first}")
    if not new_code and not new:
        return
    if not yes and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        confirm("Exclude files with .gitignore, or with exclude in [project].")
    record.parent.mkdir(parents=True, exist_ok=True)
    sent = {*known, *new, *([CODE] if code else [])}
    write_atomically(record, json.dumps({"sent": sorted(sent)}))


def confirm(hint: str = "") -> None:
    """Ask whether to send something. Raises UsageError for a no."""
    print("Send it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was sent.", hint=hint)
