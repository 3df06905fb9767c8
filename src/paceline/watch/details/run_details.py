"""Everything that a run's folder says about the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.checkpoint.score import find_best
from paceline.contract.quote import quote
from paceline.contract.run_folder import TRIALS
from paceline.contract.typed_command import cluster, to_type, type_again
from paceline.contract.verdict import DONE
from paceline.watch import origin
from paceline.watch.config import flatten, read_config
from paceline.watch.details.attempts import (
    AttemptDetails,
    Failure,
    JobStartDetails,
    read_attempts,
    read_job_starts,
)
from paceline.watch.details.json_values import finite
from paceline.watch.details.nodes import (
    NodeDetails,
    RankDetails,
    make_nodes,
    make_ranks,
    settle_ranks,
)
from paceline.watch.goodput import Goodput, Span, read_goodput
from paceline.watch.node_usage import read_node_usage
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record, typed_there
from paceline.watch.resume_hint import resume_command

MAX_NODES = 64


@dataclass(frozen=True)
class GoodputDetails:
    """Where the time went. The seconds sum to the wall time, and those of parts to their
    category.
    """

    seconds: dict[str, float]
    total: float
    parts: dict[str, dict[str, float]]  # of `starting` and `training`
    failures: int
    seconds_between_failures: float | None


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
    job_starts: list[JobStartDetails]
    failure: Failure | None  # of the newest attempt that failed
    timeline: list[Span]
    goodput: GoodputDetails
    nodes: list[NodeDetails]
    ranks: list[RankDetails]
    checkpoints: list[CheckpointDetails]
    commands: dict[str, str]  # what to type: repeat, resume, logs, fetch, cancel

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = finite(asdict(self))
        return values


def read_details(record: Record) -> RunDetails:
    """Read all that a run's folder tells, except its metrics and logs."""
    folder, details = record.folder, record.details
    usage = read_node_usage(folder, max_nodes=MAX_NODES)
    goodput = read_goodput(
        folder, record.events, is_over=record.is_over, is_waiting=record.is_waiting
    )
    with typed_there(folder):
        typed = type_again(details)
    found = find_checkpoints(folder.path)
    best = find_best(found)
    attempts = read_attempts(
        folder, goodput, is_over=record.is_over, status=record.status, events=record.events
    )
    overview = make_overview(record)
    return RunDetails(
        overview=overview,
        place=origin.place(folder.path),
        command=typed,
        config=flatten(read_config(folder)),
        settings=dict(details.get("spec") or {}),
        code=dict(details.get("code") or {}),
        attempts=attempts,
        job_starts=read_job_starts(folder, goodput, is_over=record.is_over, status=record.status),
        failure=next((each.failure for each in reversed(attempts) if each.failure), None),
        timeline=goodput.timeline,
        goodput=_describe_goodput(goodput),
        nodes=make_nodes(usage),
        ranks=settle_ranks(make_ranks(usage), overview, goodput),
        checkpoints=[
            CheckpointDetails(step, best is not None and best[0] == step)
            for step in (checkpoint_step(path.name) for path in reversed(found))
            if step is not None
        ],
        commands=_commands(record),
    )


def renew_numbers(details: RunDetails, record: Record) -> RunDetails:
    """Return details with the numbers of now: progress and goodput, but not what nodes and
    checkpoints say.
    """
    goodput = read_goodput(
        record.folder, record.events, is_over=record.is_over, is_waiting=record.is_waiting
    )
    return replace(details, overview=make_overview(record), goodput=_describe_goodput(goodput))


def _describe_goodput(goodput: Goodput) -> GoodputDetails:
    return GoodputDetails(
        dict(goodput.seconds),
        goodput.total,
        goodput.parts,
        goodput.failures,
        goodput.seconds_between_failures,
    )


def _commands(record: Record) -> dict[str, str]:
    """Return what to type to do more with a run."""
    name = record.folder.key
    # these are here, also of a run that was fetched
    commands = {"logs": to_type(f"logs {quote(name)}")}
    if cluster() and record.is_over:
        commands["fetch"] = to_type(f"fetch {quote(name)}")
    with typed_there(record.folder):
        return _commands_there(record, commands)


def _commands_there(record: Record, commands: dict[str, str]) -> dict[str, str]:
    name, details = record.folder.key, record.details
    earlier = [each for each in details.get("earlier", []) if isinstance(each, dict)]
    first = [*earlier, details][0]  # later ones may only resume it
    command, cwd = first.get("command"), details.get("cwd")
    is_elsewhere = bool(cluster())
    if (
        isinstance(command, list)
        and not _is_trial(record)
        and not (is_elsewhere and command[1:2] != ["submit"])
    ):
        place = f"cd {quote(cwd)} && " if isinstance(cwd, str) and not is_elsewhere else ""
        commands = {"repeat": place + type_again(first), **commands}
    if not record.is_over:
        commands["cancel"] = to_type(f"cancel {quote(name)}")
    elif record.status != DONE:
        commands["resume"] = resume_command(record.folder, job=record.job)
    return commands


def _is_trial(record: Record) -> bool:
    return record.folder.path.parent.name == TRIALS
