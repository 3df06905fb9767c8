"""A command with `--on` runs on the login node as it was typed, and prints here.

`forward` carries it out; `call` and `ask` return what it wrote. `make_request` is what goes there: the line, the
project's code, and secrets. Questions about them come first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.cli import console, runs, typer_options
from paceline.cli.forwarding import ALL, FileName, Forwarded, find_project, without_extras
from paceline.contract import env
from paceline.contract.foreign_records import parse_object, read_object
from paceline.contract.run_folder import write_atomically
from paceline.errors import NoSlurm, SpecError, UsageError
from paceline.launch.secrets import NO_SECRETS, choose_secrets, read_secrets
from paceline.spec.clusters import Cluster, ProjectFile, explain_table, find_cluster
from paceline.spec.job import Job, Program
from paceline.spec.load import repository_root
from paceline.spec.option import SWEEP, read_flags
from paceline.spec.settings import TABLE, options_of
from paceline.spec.shell_text import quote
from paceline.spec.user_files import state_folder
from paceline.ssh import remote_command
from paceline.ssh.code import Parcel, pack_code, pack_settings
from paceline.ssh.connection import Answer, Connection
from paceline.ssh.remote_command import RemoteCommand

STARTS = ("submit", "sweep")
OUTPUTS = ("script_only", "csv")  # options that name a file to write
PASSED_ON = ("NO_COLOR", "COLORTERM", "COLUMNS")  # variables of this terminal
CODE = "the code"  # in the list of what was sent, beside names of secrets


def forward(asked: Forwarded) -> int:
    """Carry out a command on a cluster and return its exit code."""
    outputs = [str(path) for path in map(asked.values.get, OUTPUTS) if path]
    for path in outputs:
        if not path.startswith("/"):  # nobody looks into the copy of the project there
            printed = "use --dry-run to print it"
            if asked.key != "submit":
                printed = "write to /dev/stdout, and redirect the output"
            raise UsageError(
                f"{path} would be written on {asked.names[0]}, not here.",
                hint=f"Give it a full path there, such as /scratch/me/{Path(path).name}; or {printed}.",
            )
    connection, command = make_request(asked, find_project(asked))
    submits = asked.key == "submit" and not asked.values.get("dry_run") and not outputs
    carry_out = remote_command.submit if submits else remote_command.carry_out
    return carry_out(connection, command)


def require_one(asked: Forwarded) -> None:
    if asked.has_several:
        hint = f"Run it once for each of {', '.join(cluster_names(asked))}."
        if asked.key == "submit":
            hint = "Add --first to train on the cluster that starts first, or submit to each."
        raise UsageError("This takes one cluster.", hint=hint)


def cluster_names(asked: Forwarded) -> Sequence[str]:
    if asked.names[0] != ALL:
        return asked.names
    project = find_project(asked)
    if not (names := sorted(project.clusters())):
        raise UsageError("No cluster is configured.", hint=explain_table(project))
    return names


def call(asked: Forwarded) -> tuple[Connection, Answer]:
    """Run a command on the cluster that `--on` names; return what it wrote. Raises what it complains of."""
    connection, command = make_request(asked, find_project(asked))
    return connection, remote_command.capture(connection, command)


def ask(asked: Forwarded, line: list[str]) -> tuple[Connection, Mapping[str, Any]]:
    """Do the same with a command whose answer is JSON."""
    connection, answer = call(Forwarded(asked.names, asked.key, line, asked.values))
    try:
        return connection, parse_object(answer.output)
    except ValueError:
        raise connection.unclear() from None


def point_to_cluster(problem: NoSlurm, command: str) -> NoSlurm:
    """Return the error with a hint how to reach a cluster, whose login node has Slurm."""
    if on := os.environ.get(env.ON_CLUSTER):
        hint = (
            f"If /etc/profile on {on} does not set up Slurm, load it in [profiles.{quote(on)}],"
            ' for example with setup = "module load slurm".'
        )
        return NoSlurm(problem.message, hint=hint)
    hint = (
        "From a laptop, name your cluster with --on. Write its login node into paceline.toml:\n"
        '    [profiles.alps]\n    host = "login.example.org"\n'
        f"  Then type: paceline {command} --on alps ..."
    )
    otherwise = f"Otherwise, {problem.hint[:1].lower()}{problem.hint[1:]}" if problem.hint else ""
    return NoSlurm(problem.message, hint=f"{hint}\n  {otherwise}".rstrip(), earlier=problem.earlier)


# -- what goes to a cluster ----------------------------------------------------------------------


def make_request(asked: Forwarded, project: ProjectFile) -> tuple[Connection, RemoteCommand]:
    """Return what to send to a cluster to carry out a command there. The connection is open."""
    from paceline.cli.commands.doctor import is_about_run

    require_one(asked)
    cluster = find_cluster(asked.names[0], project)
    connection = Connection(cluster)
    connection.require()
    values, key, secrets = asked.values, asked.key, NO_SECRETS
    job, is_job, args = _load(asked, cluster), bool(values.get("is_job")), values.get("args")
    about_run = is_about_run(args, is_job=is_job, is_module=bool(values.get("module")))
    needs_code = {
        # a run that is resumed has its code there, unless a script is named
        "submit": not values.get("resume") or bool(values.get("args")),
        # anything else is the name of a sweep
        "sweep": os.path.isfile(str(values.get("file"))),
        "doctor": not about_run and bool(values.get("is_job") or values.get("args")),
        # a new allocation begins in the project
        "shell": values.get("run") is None,
        "env_build": True,
    }.get(key, False)
    if key in STARTS or (key == "doctor" and not about_run):
        known = read_secrets(job, os.environ)
        secrets = choose_secrets(job, environ=os.environ, file_secrets=known, in_a_job=False)
    parcel = _pack(asked, job, project, needs_code, other_way=secrets.sources.values())
    line = [_name_there(each, job, parcel) for each in asked.line]
    # a check or a dry run shows the names of secrets; the values stay here
    starts = key in STARTS and not values.get("dry_run")
    sent = secrets.values if starts else {}
    new = {*sent, *([CODE] if needs_code and parcel.code.files else [])}
    _ask_first(cluster, parcel, new, secrets.describe(), yes=bool(values.get("yes")))
    variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    variables |= {env.ON_CLUSTER: cluster.name, env.LAPTOP_FOLDER: str(parcel.folder)}
    if cluster.has_profile:
        variables[env.PROFILE] = cluster.name
    names = {**dict.fromkeys(secrets.values, ""), **sent}
    command = RemoteCommand(line, _folder_there(parcel), parcel, variables, names, secrets.sources)
    return connection, command


def _load(asked: Forwarded, cluster: Cluster) -> Job:
    """Load the job as far as this machine is concerned: which code and which secrets it has."""
    values, cwd, program = asked.values, Path.cwd(), Program("")
    options = [option for _, option in options_of(asked.key.removesuffix("_build"))]
    typed = [(each, values.get(each.parameter)) for each in options if each.key != "params"]
    flags = tuple(read_flags(typed, os.environ))
    config = Path(values["config"]) if values.get("config") else None
    profile = values.get("cluster_profile") or (cluster.name if cluster.has_profile else "none")
    if asked.key == "sweep" and os.path.isfile(
        str(values.get("file"))
    ):  # with the secrets that its file names
        from paceline.cli.commands.sweep import load

        settings = typer_options.Settings(flags, (), config, profile)
        return load(values["file"], settings, here=True).job
    if asked.key == "submit" and values.get("args"):
        is_module = bool(values.get("module"))
        program = typer_options.find_program(
            values["args"], is_module=is_module, cwd=cwd, command="submit"
        )
    own = {option.key for option in TABLE[SWEEP]}
    flags = tuple(flag for flag in flags if flag.key not in own)
    return typer_options.Settings(flags, (), config, profile).load(program, cwd=cwd, here=True)


def _pack(
    asked: Forwarded, job: Job, project: ProjectFile, needs_code: bool, *, other_way: Iterable[str]
) -> Parcel:
    """Return the project's code, or its settings alone. The variables of some secret files go another way."""
    is_project = project.file is not None or repository_root(Path.cwd()) is not None
    names_code = asked.key in STARTS or asked.values.get("args") or asked.values.get("files")
    if not (needs_code and (is_project or names_code)):
        return pack_settings(job.folder, project.file)
    runs_here = []
    with suppress(SpecError):  # it is named by variables of the cluster
        runs_here.append(runs.scratch_here())
    starts = asked.key in STARTS and not asked.values.get("dry_run")
    # a job that starts in the project itself gets a copy that no other command has
    is_own = starts and (job.project.workdir == "project" or not job.project.snapshot)
    parcel = pack_code(job, os.environ, runs=runs_here, cluster=asked.names[0], is_own=is_own)
    if skipped := {*parcel.skipped_secrets} - {*other_way}:
        console.say_note(f"secrets left out of the code: {', '.join(sorted(skipped))}")
    _say_what_stays(job, parcel, asked.names[0])
    return parcel


def _say_what_stays(job: Job, parcel: Parcel, cluster: str) -> None:
    """Name arguments of the script that are files or folders here, such as data, and are not sent."""
    sent = {str(each) for name in parcel.code.files for each in PurePosixPath(name).parents}
    sent |= parcel.code.files.keys() | {"."}
    named = [re.sub("^-[^=]*=", "", word) for word in job.program.args]
    left = [
        name
        for name in named
        if os.path.exists(job.cwd / name)
        and name
        and _in_project(job.cwd / name, parcel) not in sent
    ]
    if left:
        console.say_note(
            f"these are not sent, because git ignores them or they are outside the project: {', '.join(left)}."
            f" If {cluster} has no such data yet, send it with `paceline data push {quote(left[0])} --on"
            f" {quote(cluster)}` and use the path that it prints."
        )


def _name_there(word: str, job: Job, parcel: Parcel) -> str:
    """Return how a command on the cluster finds a file of this machine, of which a full path would be another file.

    Raises UsageError for a file that is not sent.
    """
    if not isinstance(word, FileName):
        return word
    name = without_extras(word)
    target = _in_project(job.cwd / name, parcel)
    if target not in parcel.code.files:
        raise UsageError(
            f"{name} would not be sent: git ignores it, or it is outside the project {job.folder}.",
            hint="Only the project's code goes to the cluster: what git tracks, and new files that it does not ignore.",
        )
    there = os.path.relpath(target, _folder_there(parcel))
    return f"{'./' * there.startswith('-')}{there}{word.removeprefix(name)}"


def _folder_there(parcel: Parcel) -> str:
    """Return the folder in which the command starts: the same of the project, or its top."""
    folder = _in_project(Path.cwd(), parcel)
    return "." if folder.startswith("..") else folder


def _in_project(path: Path, parcel: Parcel) -> str:
    return Path(os.path.relpath(path.resolve(), parcel.folder)).as_posix()


# -- the question before something goes there


def _ask_first(
    cluster: Cluster, parcel: Parcel, sent: Set[str], secrets: str, *, yes: bool
) -> None:
    """Ask if the code or a secret goes there for the first time.

    Without a terminal, only say what goes there. Raises UsageError for a no.
    """
    key = f"{cluster.host}\0{parcel.folder}".encode(errors="surrogateescape")
    record = state_folder("sent") / f"{hashlib.sha256(key).hexdigest()[:16]}.json"
    known = set[str](read_object(record)["sent"]) if record.exists() else set[str]()
    if not (new := sent - known):
        return
    if CODE in new:
        console.say_note(
            f"{parcel.describe()} of {parcel.folder} will be sent to {cluster.name} for the first time"
        )
    if new - {CODE}:
        console.say_note(f"{secrets} will be sent to {cluster.name} for the first time")
    if not yes and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        confirm("Exclude files with .gitignore, or with exclude in [project].")
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, json.dumps({"sent": sorted(known | new)}))


def confirm(hint: str = "") -> None:
    """Ask whether to send something. Raises UsageError for a no."""
    print("Send it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was sent.", hint=hint)
