"""`paceline submit --on A,B --first`: submit to each cluster, keep the job that starts first, cancel the others.

All jobs of a race have its id in their records. `ps` of each cluster says how far its job is. For a minute two
may train, each in its own run folder.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console
from paceline.contract import env
from paceline.contract.foreign_records import parse_object
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import PacelineError, UsageError
from paceline.spec.option import RESOURCES
from paceline.spec.shell_text import quote
from paceline.ssh.race import Race, unfinished
from paceline.watch.run_status import OVER

if TYPE_CHECKING:
    from paceline.cli.on_cluster import Forwarded

PAUSE = 10.0  # seconds between two looks at the clusters
PATIENCE = 60.0  # seconds for an answer
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
Row = Mapping[str, Any]


def start(asked: Forwarded) -> int:
    """Submit to several clusters, and keep the first that starts."""
    from paceline.cli.cluster_request import make_request
    from paceline.cli.on_cluster import Forwarded, cluster_names, find_project
    from paceline.ssh.remote_command import capture

    names = list(dict.fromkeys(cluster_names(asked)))
    if len(names) < 2:
        raise UsageError(
            "--first needs several clusters.", hint="Name them, as in `--on alps,cedar --first`."
        )
    for key in NOT_WITH_FIRST:
        if asked.values.get(key):
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"{flag} cannot be combined with --first.", hint=f"Omit {flag}.")
    end = len(asked.line) - len(asked.values.get("args") or ())
    line = [*(word for word in asked.line[:end] if word != "--first"), *asked.line[end:]]
    config = asked.values.get("config")
    # all questions are answered before any cluster gets the job
    project = find_project(asked)
    asks = {name: Forwarded([name], asked.key, line, asked.values) for name in names}
    prepared = {name: make_request(each, project) for name, each in asks.items()}
    race = Race(secrets.token_hex(4), os.getcwd(), config and os.path.abspath(config), [])
    console.say_note(f"if this command is interrupted: paceline submit --finish {race.id}")
    failed = []
    try:
        for name, (connection, command) in prepared.items():
            race.clusters.append(name)  # from before it is sent: its answer may be lost
            race.save()
            variables = {**command.variables, env.REQUEST: f"first-{race.id}"}
            try:
                answer = capture(connection, replace(command, variables=variables))
            except PacelineError as problem:
                console.say_error(problem)
                continue
            console.say(
                "".join(f"{name}: {each}\n" for each in answer.errors.splitlines()).rstrip()
            )
            for text in answer.output.decode(errors="replace").splitlines()[:1]:
                print(console.printable(f"{name}: {text}"), flush=True)
            if answer.code != 0:
                failed.append(name)
    except KeyboardInterrupt:
        return _give_up(race)
    race.clusters = [name for name in race.clusters if name not in failed]
    return _watch(race)


def finish(name: str) -> int:
    """Go on with a race whose command was interrupted."""
    race = next((each for each in unfinished() if each.id == name), None)
    if race is None:
        known = ", ".join(each.id for each in unfinished()) or "none"
        raise UsageError(
            f"There is no unfinished submission {name!r}.", hint=f"Unfinished ones: {known}."
        )
    if os.path.isdir(race.folder):
        os.chdir(race.folder)
    race.save()
    if race.is_decided:
        _cancel(race, _look(race))
        return 0
    return _watch(race)


def _watch(race: Race) -> int:
    """Wait until one job has started; then cancel the others."""
    pause, said = float(os.environ.get(env.POLL_INTERVAL) or PAUSE), dict[str, str]()
    try:
        while True:
            found = _look(race)
            for name, row in found.items():
                text = "could not be reached" if row is None else str(row.get("status", "no job"))
                if said.get(name) != text:
                    console.say_about(name, text)
                    said[name] = text
            winner = next(
                (name for name, row in found.items() if row and row["status"] in STARTED), None
            )
            if winner is not None:
                return _keep(race, winner, found)
            if all(_is_over(row) for row in found.values()):
                race.file.unlink(missing_ok=True)
                hint = "See what happened with `paceline ps --on CLUSTER`."
                console.say_problem("No cluster is training this run.", hint)
                return 1
            time.sleep(pause)
    except KeyboardInterrupt:
        return _give_up(race)


def _look(race: Race) -> dict[str, Row | None]:
    """Return the row of each cluster's job: empty if it has none, None if it does not answer."""

    def look(name: str) -> Row | None:
        try:
            rows = parse_object(_ask(race, name, ["ps", "--json", "--all"]))["runs"]
        except (PacelineError, ValueError, KeyError):
            return None
        return next((row for row in rows if row.get("request") == f"first-{race.id}"), {})

    with ThreadPoolExecutor() as pool:
        return dict(zip(race.clusters, pool.map(look, race.clusters), strict=True))


def _is_over(row: Row | None) -> bool:
    """Return whether a cluster has no job, or one that has ended; not if it does not answer."""
    return row is not None and (not row or row["status"] in ENDED)


def _ask(race: Race, name: str, line: list[str]) -> bytes:
    from paceline.cli.cluster_request import make_request
    from paceline.cli.on_cluster import Forwarded, find_project
    from paceline.ssh.remote_command import capture

    asked = Forwarded([name], line[0], line, {"config": race.config})
    answer = capture(*make_request(asked, find_project(asked)), timeout=PATIENCE)
    if answer.code != 0:
        raise UsageError(answer.errors.strip())
    return answer.output


def _keep(race: Race, winner: str, found: Mapping[str, Row | None]) -> int:
    row = found[winner]
    assert row is not None
    run, on = quote(str(row["run_id"])), quote(winner)
    print(f"{winner}: started first and is training {run}", flush=True)
    _cancel(race, {name: each for name, each in found.items() if name != winner})
    print(f"  logs    paceline logs -f {run} --on {on}\n  cancel  paceline cancel {run} --on {on}")
    return 0


def _give_up(race: Race) -> int:
    """After Ctrl-C: cancel all jobs."""
    console.say_note("cancelling all jobs of this submission")
    _cancel(race, _look(race))
    return INTERRUPTED_EXIT


def _cancel(race: Race, found: Mapping[str, Row | None]) -> None:
    """Cancel jobs that are not over. A race with clusters that do not answer stays unfinished."""
    race.is_decided, race.clusters = True, []
    for name, row in found.items():
        if _is_over(row):
            continue
        try:
            if row is None:
                raise UsageError("it could not be reached.")
            _ask(race, name, ["cancel", str(row["run_id"])])
            print(console.printable(f"{name}: cancelled {row['run_id']}"), flush=True)
        except PacelineError as problem:
            race.clusters.append(name)
            console.say_about(name, f"its job could not be cancelled: {problem}")
    if race.clusters:
        race.save()
        console.say_note(f"to cancel what is left: paceline submit --finish {race.id}")
    else:
        race.file.unlink(missing_ok=True)
