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
from dataclasses import asdict, dataclass, replace

from paceline.cli import console, on_cluster
from paceline.cli.forwarding import Forwarded, find_project
from paceline.contract import env
from paceline.contract.foreign_records import make, parse_object, read_object
from paceline.contract.run_folder import INTERRUPTED_EXIT, write_atomically
from paceline.errors import EnvironmentProblem, PacelineError, UsageError
from paceline.spec.shell_text import quote
from paceline.spec.user_files import state_folder
from paceline.ssh.connection import Answer
from paceline.ssh.remote_command import capture
from paceline.watch.run_status import OVER

PAUSE = 10.0  # seconds between two looks at the clusters
NO_JOB, UNKNOWN = "no job", "it does not answer"  # in place of a status
# Slurm may not know a new job yet
ENDED = (OVER | {NO_JOB}) - {"lost"}
STARTED = ("running", "done", "stopped")
NOT_WITH_FIRST = ("resume", "dry_run", "script_only", "wait", "follow", "after")


@dataclass
class Race:
    """Jobs of which only one is to go on, as far as this machine knows."""

    id: str
    folder: str  # where the command was typed
    config: str | None
    clusters: list[str]  # where there may be a job
    is_decided: bool = False  # all that are left are to be cancelled

    def save(self) -> None:
        """Remember it, as long as there may be jobs."""
        file = state_folder("first") / f"{self.id}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(self)))
        if not self.clusters:
            file.unlink()

    def call(self, name: str, *line: str) -> Answer:
        """Run a command on one of the clusters."""
        asked = Forwarded([name], line[0], list(line), {"config": self.config})
        return on_cluster.call(asked)[1]


def _unfinished() -> dict[str, Race]:
    files = sorted(state_folder("first").glob("*.json"))
    return {path.stem: make(Race, read_object(path)) for path in files}


def remind() -> None:
    """Name the races that have not ended: if their commands were interrupted, all jobs may be in a queue."""
    for race in _unfinished().values():
        console.say_note(
            f"jobs of one `submit --first` may wait or run on {', '.join(race.clusters)}; if its command"
            f" has ended, keep only the first of them: paceline submit --finish {race.id}"
        )


def start(asked: Forwarded | None) -> int:
    """Submit to several clusters, and keep the first that starts. Ctrl-C cancels all jobs."""
    names = list(dict.fromkeys(on_cluster.cluster_names(asked))) if asked else []
    if asked is None or len(names) < 2:
        hint = "Name them, as in `--on alps,cedar --first`."
        raise UsageError("--first needs several clusters.", hint=hint)
    for flag in (f"--{key.replace('_', '-')}" for key in NOT_WITH_FIRST if asked.values.get(key)):
        raise UsageError(f"{flag} cannot be combined with --first.", hint=f"Omit {flag}.")
    asked.line.remove("--first")  # its place is before the script
    project, config = find_project(asked), asked.values.get("config")
    race = Race(secrets.token_hex(4), os.getcwd(), config and os.path.abspath(config), [])
    # all questions are answered before any cluster gets the job
    each = (Forwarded([name], asked.key, asked.line, asked.values) for name in names)
    requests = [on_cluster.make_request(one, project) for one in each]
    console.say_note(f"if this command is interrupted: paceline submit --finish {race.id}")
    try:
        for name, (connection, command) in zip(names, requests, strict=True):
            race.clusters.append(name)  # from before it is sent: its answer may be lost
            race.save()
            variables = {**command.variables, env.REQUEST: f"first-{race.id}"}
            try:
                answer = capture(connection, replace(command, variables=variables))
                line = answer.output.decode(errors="replace").partition("\n")[0]
                print(console.printable(f"{name}: {line}"), flush=True)
            except PacelineError as problem:  # another cluster may train it
                console.say_error(problem)
        return _watch(race)
    except KeyboardInterrupt:
        console.say_note("cancelling all jobs of this submission")
        _cancel(race, _look(race))
        return INTERRUPTED_EXIT


def finish(name: str) -> int:
    """Go on with a race whose command was interrupted."""
    races = _unfinished()
    if name not in races:
        hint = f"Unfinished ones: {', '.join(races) or 'none'}."
        raise UsageError(f"There is no unfinished submission {name!r}.", hint=hint)
    os.chdir(races[name].folder)
    return _watch(races[name])


def _watch(race: Race) -> int:
    """Wait until one job has started; then cancel the others."""
    said = ""
    while True:
        found = _look(race)
        text = "; ".join(f"{name}: {status}" for name, (status, _) in found.items())
        if text != said:
            console.say_note(text)
        said = text
        started = [name for name, (status, _) in found.items() if status in STARTED]
        for name in started[:1] if not race.is_decided else ():
            on = f"{quote(found.pop(name)[1])} --on {quote(name)}"
            print(f"{name}: started first\n  logs    paceline logs -f {on}")
            print(f"  cancel  paceline cancel {on}", flush=True)
            race.clusters.remove(name)
        if started or race.is_decided:
            _cancel(race, found)
            return 0
        if all(status in ENDED for status, _ in found.values()):
            race.clusters = []
            race.save()
            hint = "See what happened with `paceline ps --on CLUSTER`."
            raise EnvironmentProblem("No cluster is training this run.", hint=hint)
        time.sleep(float(os.environ.get(env.POLL_INTERVAL) or PAUSE))


def _look(race: Race) -> dict[str, tuple[str, str]]:
    """Return the status and the id of each cluster's run."""
    found = {}
    for name in race.clusters:
        try:
            rows = parse_object(race.call(name, "ps", "--json", "--all").output)["runs"]
        except (PacelineError, ValueError) as problem:
            found[name] = f"{UNKNOWN}: {problem}", ""
            continue
        own = (row for row in rows if row.get("request") == f"first-{race.id}")
        found[name] = next(((row["status"], row["run_id"]) for row in own), (NO_JOB, ""))
    return found


def _cancel(race: Race, found: dict[str, tuple[str, str]]) -> None:
    """Cancel the jobs that are left. A race with clusters that do not answer stays unfinished."""
    race.is_decided = True
    for name, (status, run) in found.items():
        try:
            if run and status not in ENDED:
                race.call(name, "cancel", run)
                print(console.printable(f"{name}: cancelled {run}"), flush=True)
            if not status.startswith(UNKNOWN):
                race.clusters.remove(name)
        except PacelineError as problem:
            console.say_note(f"{name}: its job could not be cancelled: {problem}")
    race.save()
    if race.clusters:
        console.say_note(f"to cancel what is left: paceline submit --finish {race.id}")
