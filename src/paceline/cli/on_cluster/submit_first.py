"""`paceline submit --on A,B --first`: submit to each, train where it starts first.

Each job waits for permission before its ranks start, and ends without training if none comes. This command gives it to
one of them, once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, runs
from paceline.contract.files.foreign_records import parse_object
from paceline.errors import PacelineError, UsageError
from paceline.spec.option import RESOURCES

if TYPE_CHECKING:
    from paceline.cli.on_cluster.on_cluster import Forwarded
    from paceline.launch.slurm_job import Submitted
    from paceline.ssh.cluster_race_record import ClusterRaceRecord
    from paceline.ssh.code_push.project_code import Parcel
    from paceline.ssh.connection import Connection
    from paceline.ssh.request import Request

PATIENCE = "10m"
ALIVE = 60.0  # seconds after its last sign until an agent that waits counts as gone
First = Annotated[
    bool,
    typer.Option(
        "--first",
        help="With --on A,B: train on the cluster that starts first, cancel the others.",
        rich_help_panel=RESOURCES,
    ),
]
FirstTimeout = Annotated[
    str | None,
    typer.Option(
        "--first-timeout",
        metavar="TIME",
        rich_help_panel=RESOURCES,
        help="With --first: how long a job that has started waits for this command (default: 10m).",
    ),
]
Finish = Annotated[
    str | None,
    typer.Option(
        "--finish",
        metavar="ID",
        help="Finish a --first that was interrupted.",
        rich_help_panel=RESOURCES,
    ),
]
ServeFirst = Annotated[str | None, typer.Option("--serve-first", hidden=True)]
NOT_WITH_FIRST = {
    "resume": "--resume",
    "dry_run": "--dry-run",
    "script_only": "--script-only",
    "wait": "--wait",
    "follow": "--follow",
    "after": "--after",
}


# -- the side of a cluster ---------------------------------------------------------------------------------------


def read_patience(text: str | None) -> float:
    """Return how long a job waits for permission. Raises UsageError where no laptop can give it."""
    from paceline.contract.env import ON_CLUSTER
    from paceline.spec.quantities import parse_seconds

    if not os.environ.get(ON_CLUSTER):
        raise UsageError(
            "--first needs several clusters.", hint="Name them, as in `--on alps,cedar --first`."
        )
    try:
        return float(parse_seconds(text or PATIENCE))
    except ValueError as problem:
        raise UsageError(
            f"Invalid --first-timeout {text!r}: {problem}.", hint="Use a duration such as 10m."
        ) from None


def answer(submitted: Submitted) -> int:
    """Tell the laptop which run this is."""
    for note in submitted.notes:
        console.say_note(note)
    print(json.dumps({"run": submitted.folder.key, "job": submitted.job_id}), flush=True)
    return 0


def serve(run: str) -> int:
    """Answer the laptop's questions about a run, and do what it decides."""
    from paceline.contract.files.grant_file import GRANTED, REFUSED, decide_grant, read_grant
    from paceline.launch.actions import cancel_run
    from paceline.slurm.job_states import squeue_and_sacct
    from paceline.slurm.job_states.meanings import WAITING
    from paceline.watch.records import read_record

    folder = runs.own(run)
    for line in sys.stdin:
        asked, _, winner = line.rstrip("\n").partition(" ")
        if asked == "grant":
            decide_grant(folder, GRANTED)
        elif asked == "refuse" and decide_grant(folder, REFUSED, winner) != GRANTED:
            record = read_record(folder, squeue_and_sacct.states)
            if not record.is_over:
                cancel_run(folder, running=record.status == "running")
        decision, record = read_grant(folder), read_record(folder)
        waits = decision is None and not record.is_over and _age(folder.awaits_grant) < ALIVE
        about = {
            "decision": decision,
            "waits": waits,
            "over": record.is_over,
            "status": record.status,
        }
        # The detail of a job in the queue has the time when it is expected to start, which changes all the while.
        state = record.state
        reason = state.reason if state is not None and state.phase == WAITING else record.detail
        print(json.dumps({**about, "detail": record.detail, "reason": reason}), flush=True)
    return 0


def _age(path: Path) -> float:
    """Return the seconds since an agent that waits has last said so, by the clock of the file system."""
    clock = path.with_name(f".clock-{os.urandom(6).hex()}")
    try:
        # opened, so that a network file system does not answer from its memory
        with open(path, "rb") as file:
            said = os.fstat(file.fileno()).st_mtime
        clock.touch()
        os.utime(clock)
        return clock.stat().st_mtime - said
    except OSError:
        return float("inf")
    finally:
        with suppress(OSError):
            clock.unlink(missing_ok=True)


# -- the side of the laptop --------------------------------------------------------------------------------------


def start(asked: Forwarded) -> int:
    """Submit to several clusters, and keep the first that starts."""
    from paceline.cli.on_cluster.on_cluster import cluster_names
    from paceline.ssh.cluster_race_record import ClusterRaceRecord

    names = list(dict.fromkeys(cluster_names(asked)))
    if len(names) < 2:
        raise UsageError(
            "--first needs several clusters.", hint="Name them, as in `--on alps,cedar --first`."
        )
    for key, flag in NOT_WITH_FIRST.items():
        if asked.values.get(key):
            raise UsageError(
                f"{flag} cannot be combined with --first.",
                hint=f"Omit {flag}, or use a single cluster.",
            )
    _require_no_interrupted(asked.line, names)
    prepared = _prepare(asked, names)
    config = asked.values.get("config")
    record = ClusterRaceRecord.begin(
        os.path.abspath(config) if isinstance(config, str) else None, asked.line, names
    )
    with record.locked():
        record.save()
        console.say_note(f"if this command is interrupted: paceline submit --finish {record.id}")
        try:
            problems = [
                problem
                for name in names
                if (problem := _submit(*prepared[name], record)) is not None
            ]
            if record.submissions:
                return _run(record)
        except KeyboardInterrupt:
            if record.is_given_up:
                raise
            return _run(record, gives_up=True)
        record.finish()
        raise problems[-1]


def _require_no_interrupted(line: Sequence[str], names: Sequence[str]) -> None:
    """Raise an error if the same command was interrupted, so that its jobs may still train; in a terminal, ask."""
    from paceline.ssh.cluster_race_record import find_interrupted

    record = find_interrupted(line, names)
    if record is None:
        return
    where = ", ".join(dict.fromkeys((*record.submissions, *record.runs)))
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    found = f"The same command was interrupted on {since}, and its jobs may still be on {where}"
    hint = f"To continue with them: paceline submit --finish {record.id}"
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        raise UsageError(
            f"{found}.", hint=f"{hint}. To submit this once more: add --name with another name."
        )
    console.say_note(f"{found[0].lower()}{found[1:]}. {hint}")
    print("Submit it once more? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was submitted.", hint=hint)


def finish(name: str) -> int:
    """Go on with a submission to several clusters whose command was interrupted."""
    from paceline.ssh.cluster_race_record import ClusterRaceRecord

    record = ClusterRaceRecord.load(name)
    with record.locked():
        record = ClusterRaceRecord.load(name)
        if record.is_over:
            console.say_note(f"{name} is already finished")
            return 0
        if os.path.isdir(record.folder):
            os.chdir(record.folder)
        return _run(record, gives_up=record.is_given_up and not record.is_granted)


def _prepare(asked: Forwarded, names: list[str]) -> dict[str, tuple[Connection, Request, Parcel]]:
    """Return what to send to each cluster. All questions are answered then, and Paceline is on all of them."""
    from paceline.cli.on_cluster.cluster_request import make_request
    from paceline.cli.on_cluster.on_cluster import Forwarded, find_project
    from paceline.ssh.installation import require_installed

    project = find_project(asked)
    made = {
        name: make_request(Forwarded([name], asked.key, asked.line, asked.values), project)
        for name in names
    }
    for connection, _, _ in made.values():
        require_installed(connection, console.say_note)
    return made


def _submit(
    connection: Connection, request: Request, parcel: Parcel, record: ClusterRaceRecord
) -> PacelineError | None:
    """Submit to one cluster; return why that has failed.

    `record` then has its submission still if there may be a job all the same.
    """
    from paceline.cli.on_cluster.cluster_race import read_run
    from paceline.ssh.forwarded_command import converse

    name = connection.cluster.name
    request = replace(request, submission=record.send(name))
    try:
        try:
            conversation = converse(connection, request, parcel, note=console.say_note)
        except PacelineError:
            record.take_back(name)
            raise
        with conversation as talk:
            last = b""
            for line in iter(talk.read_line, b""):
                last = line
            code, errors = talk.close(), talk.errors
        for said in errors.splitlines():
            console.say(f"{name}: {said.removeprefix('paceline: ')}")
        if code != 0 or not last:
            _settle(record, name)
            raise UsageError(f"{name} did not accept the job.", hint="Its message is above.")
        answer = parse_object(last)
        record.note_run(name, read_run(answer))
        print(
            console.printable(f"{name}: submitted {record.runs[name]} as job {answer['job']}"),
            flush=True,
        )
    except (PacelineError, OSError, ValueError, KeyError, TypeError) as problem:
        found = (
            problem
            if isinstance(problem, PacelineError)
            else UsageError(f"{name} gave no usable answer.")
        )
        console.say_error(found)
        return found
    return None


def _settle(record: ClusterRaceRecord, name: str) -> None:
    """After a submission that has failed: ask whether there is a job. Without an answer, it is asked again later."""
    from paceline.cli.on_cluster.cluster_race import ask_outcome

    with suppress(PacelineError, OSError, ValueError):
        if ask_outcome(name, record.submissions[name], record.config) is None:
            record.take_back(name)


def _run(record: ClusterRaceRecord, *, gives_up: bool = False) -> int:
    from paceline.cli.on_cluster.cluster_race import ClusterRace

    with ClusterRace(record) as race:
        if gives_up:
            return race.give_up()
        try:
            return race.run()
        except KeyboardInterrupt:
            return race.give_up()
