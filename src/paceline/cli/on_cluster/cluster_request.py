"""What a command sends to a cluster: its line, the project's code, and secrets. Questions about them come first."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import console, runs
from paceline.cli.on_cluster.payload import payload_of
from paceline.contract import env
from paceline.contract.quote import quote
from paceline.errors import SpecError, UsageError
from paceline.launch.secrets.declared import NO_SECRETS
from paceline.spec.option import SWEEP
from paceline.spec.settings import TABLE, options_of

if TYPE_CHECKING:
    from paceline.cli.on_cluster.on_cluster import Forwarded
    from paceline.spec import Job
    from paceline.spec.clusters import Cluster, ProjectFile
    from paceline.ssh.code_push.project_code import Parcel
    from paceline.ssh.connection import Connection
    from paceline.ssh.request import Request

OPTIONS = {"env_build": "env"}  # the name in the table of options, if it is not the key
EXTRAS = re.compile(r"(.*?)(\[[\w., -]*\])")  # of a file, as in pyproject.toml[gpu]
PASSED_ON = ("NO_COLOR", "COLORTERM", "COLUMNS")  # variables of this terminal


class FileName(str):
    """A word of a command line that names a file of this machine."""


def mark_file(word: str) -> str:
    """Return a word as a `FileName` if there is such a file, perhaps with extras."""
    return FileName(word) if os.path.isfile(word) or os.path.isfile(_without_extras(word)) else word


def _without_extras(word: str) -> str:
    match = EXTRAS.fullmatch(word)
    return match[1] if match and not os.path.exists(word) else word


def make_request(asked: Forwarded, project: ProjectFile) -> tuple[Connection, Request, Parcel]:
    """Return what to send to a cluster to carry out a command there. The connection is open."""
    from paceline.cli.on_cluster.send_question import ask_first
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.request import Request

    cluster = find_cluster(asked.names[0], project)
    connection = Connection(cluster)
    connection.require()
    job = _load(asked, cluster)
    payload = payload_of(asked.key, asked.values)
    found = _secrets(job) if payload.secrets or payload.secret_names else NO_SECRETS
    parcel = _pack(asked, job, project, code=payload.code, secret_files={*found.sources.values()})
    line = [
        _name_there(word, job, parcel) if isinstance(word, FileName) else word
        for word in asked.line
    ]
    secrets = found if payload.secrets else replace(found, values=dict.fromkeys(found.values, ""))
    sends_code = payload.code and bool(parcel.code.files)
    if sends_code or (payload.secrets and secrets.values):
        sent = secrets if payload.secrets else NO_SECRETS
        is_announced = ask_first(
            cluster, parcel, sent, code=sends_code, yes=bool(asked.values.get("yes"))
        )
        parcel = replace(parcel, is_announced=is_announced)
    request = Request(
        line,
        _relative(Path.cwd(), parcel.folder),
        parcel.code,
        _variables(cluster, parcel.folder),
        secrets.values,
        secrets.sources,
        submits=_submits(asked),
        awaits=_awaits(asked),
        own_folder=payload.code and _works_in_project(asked, job),
    )
    return connection, request, parcel


def _submits(asked: Forwarded) -> bool:
    """Whether the command submits jobs there, unless something is wrong."""
    does_not = ("dry_run", "script_only", "local")
    return asked.key in ("submit", "sweep") and not any(asked.values.get(each) for each in does_not)


def _awaits(asked: Forwarded) -> str:
    """Return what the laptop does once the job is submitted: the other side only submits it."""
    from paceline.ssh.request import FOLLOW, WAIT

    if asked.key != "submit" or not _submits(asked):
        return ""
    return FOLLOW if asked.values.get("follow") else WAIT if asked.values.get("wait") else ""


def _works_in_project(asked: Forwarded, job: Job) -> bool:
    """Whether the command starts a job in the project itself, rather than in a copy."""
    submits = asked.key in ("submit", "sweep") and not asked.values.get("dry_run")
    return submits and (job.project.workdir == "project" or not job.project.snapshot)


def _load(asked: Forwarded, cluster: Cluster) -> Job:
    """Load the job as far as this machine is concerned: which code and which secrets it has."""
    from paceline.cli.typer_options import Settings, find_program, this_cluster
    from paceline.spec import Program
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
    from paceline.ssh.code_push.project_code import pack_code, pack_settings

    is_project = project.file is not None or repository_root(Path.cwd()) is not None
    names_code = (
        asked.key in ("submit", "sweep") or asked.values.get("args") or asked.values.get("files")
    )
    if not (code and (is_project or names_code)):
        return pack_settings(job.folder, [project.file] if project.file is not None else [])
    parcel = pack_code(job, os.environ, runs=_runs_here(), cluster=asked.names[0])
    if skipped := [each for each in parcel.skipped_secrets if each not in secret_files]:
        console.say_note(f"secrets left out of the code: {', '.join(skipped)}")
    named = [
        each.partition("=")[2] if re.match(r"-[^=]*=", each) else each for each in job.program.args
    ]
    left = [each for each in named if _stays_here(each, job, parcel)]
    if left:
        send = f"paceline data push {quote(left[0])} --on {quote(asked.names[0])}"
        console.say_note(
            f"these are not sent, because git ignores them or they are outside the project: {', '.join(left)}."
            f" If {asked.names[0]} has no such data yet, send it with `{send}` and use the path that it prints."
        )
    return parcel


def _runs_here() -> list[Path]:
    try:
        return [runs.scratch_here()]
    except SpecError:  # it is named by variables of the cluster
        return []


def _name_there(word: FileName, job: Job, parcel: Parcel) -> str:
    """Return how a command on the cluster finds a file of this machine: as it was typed, unless that leads elsewhere.

    A full path would name a file of the cluster's. Raises UsageError for a file that is not sent.
    """
    name = _without_extras(word)
    place, target = (
        _place(job.cwd / name, parcel),
        _place(Path(os.path.realpath(job.cwd / name)), parcel),
    )
    if target not in parcel.code.files:
        raise UsageError(
            f"{name} would not be sent: git ignores it, or it is outside the project {job.folder}.",
            hint="Only the project's code goes to the cluster: what git tracks, and new files that it does not ignore.",
        )
    folder, inside = (
        _relative(job.cwd, parcel.folder),
        place if place in parcel.code.files else target,
    )
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
    return (
        inside != "."
        and inside not in parcel.code.files
        and not any(each.startswith(f"{inside}/") for each in parcel.code.files)
    )


def _secrets(job: Job) -> Any:
    from paceline.launch.secrets.declared import choose_secrets
    from paceline.launch.secrets.secrets import read_secrets

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
