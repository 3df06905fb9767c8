"""`paceline submit --on A,B --first`: submit to each cluster, keep the job that starts first, cancel the others.

All jobs of a race have its id in their records, and `ps` of each cluster says how far its job is. For a minute two
may train, each in its own run folder. A file here knows the race until all but one are cancelled: if this command is
interrupted, the next one with `--on` says how to finish it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from paceline.cli import console, on_cluster
from paceline.cli.cluster_request import make_request
from paceline.cli.on_cluster import Forwarded
from paceline.contract import env
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import write_atomically
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import PacelineError, UsageError
from paceline.spec.home_path import state_folder
from paceline.spec.option import RESOURCES
from paceline.spec.shell_text import quote
from paceline.watch.run_status import OVER

if TYPE_CHECKING:
    from paceline.ssh.connection import Connection
    from paceline.ssh.remote_command import RemoteCommand

PAUSE = 10.0  # seconds between two looks at the clusters
ENDED = OVER - {"lost"}  # Slurm may not know a new job yet
STARTED = ("running", "done", "stopped")
First = Annotated[
    bool,
    typer.Option(
        "--first",
        help="With --on A,B: train on the cluster that starts first, cancel the others.",
        rich_help_panel=RESOURCES,
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
NOT_WITH_FIRST = ("resume", "dry_run", "script_only", "wait", "follow", "after")
SEVERAL = UsageError(
    "--first needs several clusters.", hint="Name them, as in `--on alps,cedar --first`."
)
Row = Mapping[str, Any]  # of `ps --json`


@dataclass
class Race:
    """Jobs of which only one is to go on, as far as this machine knows."""

    id: str
    folder: str  # where the command was typed
    config: str | None
    clusters: list[str]  # where there may be a job
    is_decided: bool = False  # all that are left are to be cancelled
    process: int = 0  # of the command that watches them

    @property
    def file(self) -> Path:
        return state_folder("first") / f"{self.id}.json"

    def save(self) -> None:
        """Remember it, as long as there may be jobs."""
        self.process = os.getpid()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(asdict(self)))
        if not self.clusters:
            self.file.unlink()


def _unfinished() -> list[Race]:
    return [Race(**read_object(path)) for path in sorted(state_folder("first").glob("*.json"))]


def remind() -> None:
    """Name the races that were interrupted: their jobs may all be in a queue."""
    for race in _unfinished():
        if not psutil.pid_exists(race.process):
            console.say_note(
                f"jobs of one `submit --first` may wait or run on {', '.join(race.clusters)};"
                f" to keep only the first of them: paceline submit --finish {race.id}"
            )


def start(asked: Forwarded) -> int:
    """Submit to several clusters, and keep the first that starts. Ctrl-C cancels all jobs."""
    names = list(dict.fromkeys(on_cluster.cluster_names(asked)))
    if len(names) < 2:
        raise SEVERAL
    for flag in (f"--{key.replace('_', '-')}" for key in NOT_WITH_FIRST if asked.values.get(key)):
        raise UsageError(f"{flag} cannot be combined with --first.", hint=f"Omit {flag}.")
    asked.line.remove("--first")  # its place is before the script
    project, config = on_cluster.find_project(asked), asked.values.get("config")
    race = Race(secrets.token_hex(4), os.getcwd(), config and os.path.abspath(config), [])
    # all questions are answered before any cluster gets the job
    requests = [
        make_request(Forwarded([name], asked.key, asked.line, asked.values), project)
        for name in names
    ]
    console.say_note(f"if this command is interrupted: paceline submit --finish {race.id}")
    try:
        for name, (connection, command) in zip(names, requests, strict=True):
            race.clusters.append(name)  # from before it is sent: its answer may be lost
            race.save()
            _submit(name, connection, command, f"first-{race.id}")
        return _watch(race)
    except KeyboardInterrupt:
        console.say_note("cancelling all jobs of this submission")
        _cancel(race)
        return INTERRUPTED_EXIT


def _submit(name: str, connection: Connection, command: RemoteCommand, request: str) -> None:
    """Submit to one cluster, and print its answer."""
    from paceline.ssh.remote_command import capture

    command = replace(command, variables={**command.variables, env.REQUEST: request})
    answer = capture(connection, command)
    for line in answer.errors.splitlines():
        console.say_about(name, line)
    first, *_ = answer.output.decode(errors="replace").splitlines() or ["not submitted"]
    print(console.printable(f"{name}: {first}"), flush=True)


def finish(name: str) -> int:
    """Go on with a race whose command was interrupted."""
    known = {race.id: race for race in _unfinished()}
    if name not in known:
        raise UsageError(
            f"There is no unfinished submission {name!r}.",
            hint=f"Unfinished ones: {', '.join(known) or 'none'}.",
        )
    os.chdir(known[name].folder)
    known[name].save()
    return _watch(known[name])


def _watch(race: Race) -> int:
    """Wait until one job has started; then cancel the others."""
    said: dict[str, str] = {}
    while not race.is_decided:
        found = _look(race)
        for name, row in found.items():
            text = "could not be reached" if row is None else str(row.get("status", "no job"))
            if said.get(name) != text:
                console.say_about(name, text)
            said[name] = text
        started = [name for name, row in found.items() if row and row["status"] in STARTED]
        if started:
            run = quote(str((found[started[0]] or {})["run_id"]))
            on = f"{run} --on {quote(started[0])}"
            print(f"{started[0]}: started first and is training {run}")
            print(f"  logs    paceline logs -f {on}\n  cancel  paceline cancel {on}", flush=True)
            race.clusters.remove(started[0])
            race.is_decided = True
        elif all(map(_is_over, found.values())):
            race.file.unlink()
            hint = "See what happened with `paceline ps --on CLUSTER`."
            console.say_problem("No cluster is training this run.", hint)
            return 1
        else:
            time.sleep(float(os.environ.get(env.POLL_INTERVAL) or PAUSE))
    _cancel(race)
    return 0


def _look(race: Race) -> dict[str, Row | None]:
    """Return the row of each cluster's job: empty if it has none, None if it does not answer."""

    def look(name: str) -> Row | None:
        asked = Forwarded([name], "ps", [], {"config": race.config})
        try:
            rows = on_cluster.ask(asked, ["ps", "--json", "--all"])[1]["runs"]
        except PacelineError:
            return None
        return next((row for row in rows if row.get("request") == f"first-{race.id}"), {})

    with ThreadPoolExecutor() as pool:
        return dict(zip(race.clusters, pool.map(look, race.clusters), strict=True))


def _is_over(row: Row | None) -> bool:
    """Return whether a cluster has no job, or one that has ended; not if it does not answer."""
    return row is not None and (not row or row["status"] in ENDED)


def _cancel(race: Race) -> None:
    """Cancel the jobs that are left. A race with clusters that do not answer stays unfinished."""
    found = _look(race)
    race.is_decided, race.clusters = True, []
    for name, row in found.items():
        if _is_over(row):
            continue
        race.clusters.append(name)
        if row is None:
            console.say_about(name, "its job could not be cancelled: it could not be reached")
            continue
        line = ["cancel", str(row["run_id"])]
        try:
            on_cluster.call(Forwarded([name], "cancel", line, {"config": race.config}))
        except PacelineError as problem:
            console.say_about(name, f"its job could not be cancelled: {problem}")
        else:
            race.clusters.remove(name)
            print(console.printable(f"{name}: cancelled {row['run_id']}"), flush=True)
    race.save()
    if race.clusters:
        console.say_note(f"to cancel what is left: paceline submit --finish {race.id}")
