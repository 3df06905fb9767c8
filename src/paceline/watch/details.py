"""A run with everything that its folder tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.contract.checkpoint import checkpoint_step, find_best, find_checkpoints
from paceline.contract.foreign_records import read_fields, read_text
from paceline.contract.heartbeat_file import ABSENT, FINISHED, READY, RUNNING, SAVED_AND_STOPPED
from paceline.contract.run_folder import (
    DONE,
    DONE_UNSAVED,
    STOPPED,
    TRIALS,
    AttemptFolder,
    RunFolder,
    read_verdict,
)
from paceline.spec.shell_text import cluster, command_line, quote, to_type
from paceline.watch import origin
from paceline.watch.failure import failure_text, read_failure, resume_command
from paceline.watch.goodput import Goodput, Span
from paceline.watch.node_usage import (
    NodeUsage,
    newest_samples,
    read_node_usage,
    read_ranks,
    slow_ranks,
)
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record, typed_there


def read_config(folder: RunFolder) -> dict[str, Any]:
    """Return the settings of a run; empty if its script has passed none."""
    return read_fields(folder.config)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `model.width`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return found


CANCELLED = "cancelled"  # the status of a run
MAX_TRACEBACK = 20_000  # characters at its end


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None if the launch itself failed."""

    attempt: int
    rank: int | None
    host: str
    text: str
    where: str
    traceback: str


@dataclass(frozen=True)
class AttemptDetails:
    """One try at running the ranks. Times are in seconds since 1970."""

    number: int
    job_start: str
    began: float | None
    ended: float | None  # None while it runs
    verdict: str  # done, stopped, cancelled or failed; empty while it runs, or if it was killed
    failure: Failure | None
    reason: str = ""  # why it was asked to stop, such as its time limit


def read_attempts(record: Record) -> list[AttemptDetails]:
    """Return all attempts, oldest first. The last one of a run that was cancelled was cancelled,
    too.
    """
    reasons = _stop_reasons(record.events)
    found = []
    for attempt in record.folder.attempts():
        spans = [span for span in record.goodput.timeline if span.attempt == attempt.number]
        verdict, failure = read_verdict(attempt.verdict) or "", read_failure(attempt)
        is_last = attempt.number == record.attempts
        runs = is_last and not record.is_over and not verdict
        if is_last and record.status == CANCELLED and verdict in ("", STOPPED):
            verdict = CANCELLED
        stopped = not failure and verdict in ("", STOPPED, CANCELLED)
        start = read_text(attempt.start)
        found.append(
            AttemptDetails(
                number=attempt.number,
                job_start=next(iter(start.split()), ""),
                began=spans[0].began if spans else None,
                ended=spans[-1].ended if spans and not runs else None,
                verdict=verdict,
                failure=_failure(attempt, failure) if failure else None,
                reason=reasons.get(attempt.number, "") if stopped else "",
            )
        )
    return found


def _stop_reasons(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return why attempts were asked to stop, as their head agents said: the first request
    counts.
    """
    found: dict[int, str] = {}
    current = 0
    for event in events:
        if event["event"] in ("launch", "ranks"):
            current = max(current, event.get("attempt", 0))
        elif event["event"] == "stop_requested" and isinstance(event.get("by"), str):
            found.setdefault(current, event["by"])
    return found


def _failure(attempt: AttemptFolder, failure: dict[str, Any]) -> Failure:
    rank = failure.get("rank")
    error = {} if rank is None else read_fields(attempt.error(rank))
    traceback = str(error.get("traceback", ""))[-MAX_TRACEBACK:]
    host, where = str(failure.get("host", "")), str(failure.get("where", ""))
    return Failure(attempt.number, rank, host, failure_text(failure), where, traceback)


MAX_SAMPLES = 200  # of a node, evenly spaced
STARTING = "starting"
STATES = {
    ABSENT: STARTING,
    READY: STARTING,
    RUNNING: "running",
    SAVED_AND_STOPPED: "stopped",
    FINISHED: "finished",
}
ENDED = {DONE: "finished", DONE_UNSAVED: "finished", STOPPED: "stopped"}  # by the status of the run


@dataclass(frozen=True)
class RankDetails:
    """A rank, as its agent saw it last."""

    rank: int
    host: str
    state: str  # starting, running, stopped, finished, or ended with a run that was not done
    step: int
    seconds_per_step: float
    waited: float  # seconds, for data, since its first step
    age: float | None  # seconds since its last heartbeat, at the time of the sample
    is_slow: bool


@dataclass(frozen=True)
class NodeDetails:
    """A node of the run: what it has, and its newest samples (time, cpu, memory, gpus, ...)."""

    node: int
    host: str
    cores: int | None
    memory: int | None  # bytes
    gpus: list[dict[str, Any]]  # name, memory
    samples: list[dict[str, Any]]


def make_ranks(usage: Sequence[NodeUsage], record: Record) -> list[RankDetails]:
    """Return the ranks of the newest job start, as they are now: agents take samples at intervals,
    and none after the end of a run.
    """
    samples = read_ranks(newest_samples(each) for each in usage)
    slow, timeline = slow_ranks(samples), record.goodput.timeline
    # A script without the runtime has no heartbeats, so nobody sees that its ranks have started.
    runs = bool(timeline) and timeline[-1].kind == "running"
    found = []
    for rank, known in samples.items():
        last = known[-1]
        state, step = STATES.get(last.state, "running"), last.step
        if record.is_over:
            ended = ENDED.get(record.status, "ended")
            # One that failed may have lagged behind, as the last sample saw it.
            if ended != "ended" or state == STARTING:
                step = max(step, record.latest.step or 0)
            state = ended
        elif runs and state == STARTING:
            state = "running"
        pace, is_slow = last.seconds_per_step, rank in slow
        found.append(
            RankDetails(rank, last.host, state, step, pace, last.waited, last.age, is_slow)
        )
    return found


def make_node(usage: NodeUsage) -> NodeDetails:
    gpus = usage.details.get("gpus")
    kept = thin_samples(usage.samples, MAX_SAMPLES)  # those of ranks are in `ranks`
    cores, memory = usage.details.get("cores"), usage.details.get("memory_total")
    return NodeDetails(
        usage.node,
        usage.host,
        cores if isinstance(cores, int) else None,
        memory if isinstance(memory, int) else None,
        [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else [],
        [{name: each for name, each in sample.items() if name != "ranks"} for sample in kept],
    )


def thin_samples(samples: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return at most so many samples, evenly spaced, the last one among them."""
    every = max(1, -(-len(samples) // limit))
    return [*samples[::-1]][::every][::-1]


MAX_NODES = 64


@dataclass(frozen=True)
class CheckpointDetails:
    step: int
    is_best: bool


@dataclass(frozen=True)
class RunDetails:
    """A run with everything that its folder tells, except its metrics and logs."""

    overview: Overview
    place: str  # its folder; of a run on a cluster, with the cluster
    command: str
    config: dict[str, Any]  # flat: `model.width`
    settings: dict[str, Any]  # the resolved tables of paceline.toml and flags
    code: dict[str, Any]
    attempts: list[AttemptDetails]
    failure: Failure | None  # of the newest attempt that failed
    timeline: list[Span]
    goodput: Goodput
    nodes: list[NodeDetails]
    ranks: list[RankDetails]
    checkpoints: list[CheckpointDetails]
    commands: dict[str, str]  # what to type: repeat, resume, logs, fetch, cancel

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "goodput": self.goodput.to_json()}


def read_details(record: Record) -> RunDetails:
    """Read all that a run's folder tells, except its metrics and logs."""
    folder, details = record.folder, record.details
    usage = read_node_usage(folder, max_nodes=MAX_NODES)
    with typed_there(folder):
        typed = type_again(details)
    found = find_checkpoints(folder.path)
    best, attempts = find_best(found), read_attempts(record)
    steps = [checkpoint_step(path.name) for path in reversed(found)]
    return RunDetails(
        overview=make_overview(record),
        place=origin.place(folder.path),
        command=typed,
        config=flatten(read_config(folder)),
        settings=dict(details.get("spec") or {}),
        code=dict(details.get("code") or {}),
        attempts=attempts,
        failure=next((each.failure for each in reversed(attempts) if each.failure), None),
        timeline=record.goodput.timeline,
        goodput=record.goodput,
        nodes=[make_node(each) for each in usage],
        ranks=make_ranks(usage, record),
        checkpoints=[
            CheckpointDetails(step, best is not None and best[0] == step)
            for step in steps
            if step is not None
        ],
        commands=_commands(record),
    )


def _commands(record: Record) -> dict[str, str]:
    """Return what to type to do more with a run."""
    name, details = quote(record.folder.key), record.details
    # these are here, also of a run that was fetched
    commands = {"logs": to_type(f"logs {name}")}
    if cluster() and record.is_over:
        commands["fetch"] = to_type(f"fetch {name}")
    earlier = [each for each in details.get("earlier", []) if isinstance(each, dict)]
    first = [*earlier, details][0]  # later ones may only resume it
    command, cwd = first.get("command"), details.get("cwd")
    is_trial = record.folder.path.parent.name == TRIALS
    with typed_there(record.folder):
        here = not cluster()
        if isinstance(command, list) and not is_trial and (here or command[1:2] == ["submit"]):
            place = f"cd {quote(cwd)} && " if isinstance(cwd, str) and here else ""
            commands = {"repeat": place + type_again(first), **commands}
        if not record.is_over:
            commands["cancel"] = to_type(f"cancel {name}")
        elif record.status != DONE:
            commands["resume"] = resume_command(record.folder, job=record.job)
    return commands


def type_again(start: Mapping[str, Any]) -> str:
    """Return a recorded command as it is typed where the user is: the record of a run on a cluster
    has no `--on`.
    """
    command = start.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    if (name := cluster()) and words[:2] == ["paceline", "submit"]:
        words = [*words[:2], "--on", name, *words[2:]]
    return command_line(words)
