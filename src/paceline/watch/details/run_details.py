"""A run with everything that its folder tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.checkpoint.score import find_best
from paceline.contract.run_folder import TRIALS
from paceline.contract.verdict import DONE
from paceline.plan.quote import command_line, quote
from paceline.watch.config import flatten, read_config
from paceline.watch.details.attempts import AttemptDetails, Failure, JobStartDetails, read_attempts, read_job_starts
from paceline.watch.details.json_values import finite
from paceline.watch.details.nodes import NodeDetails, RankDetails, make_nodes, make_ranks
from paceline.watch.goodput import Span, read_goodput
from paceline.watch.node_usage import read_node_usage
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record
from paceline.watch.resume_hint import resume_command

MAX_NODES = 64


@dataclass(frozen=True)
class GoodputDetails:
    """Where the time went. The seconds sum to the wall time, and those of parts to their category."""

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
    commands: dict[str, str]  # what to type: repeat, resume, logs, cancel

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = finite(asdict(self))
        return values


def read_details(record: Record) -> RunDetails:
    """Read all that a run's folder tells, except its metrics and logs."""
    folder, details = record.folder, record.details
    usage = read_node_usage(folder, max_nodes=MAX_NODES)
    goodput = read_goodput(folder, record.events, is_over=record.is_over, is_waiting=record.is_waiting)
    command = details.get("command")
    found = find_checkpoints(folder.path)
    best = find_best(found)
    attempts = read_attempts(folder, goodput, is_over=record.is_over, status=record.status)
    return RunDetails(
        overview=make_overview(record),
        command=command_line(map(str, command)) if isinstance(command, list) else "",
        config=flatten(read_config(folder)),
        settings=dict(details.get("spec") or {}),
        code=dict(details.get("code") or {}),
        attempts=attempts,
        job_starts=read_job_starts(folder, goodput, is_over=record.is_over, status=record.status),
        failure=next((each.failure for each in reversed(attempts) if each.failure), None),
        timeline=goodput.timeline,
        goodput=GoodputDetails(
            dict(goodput.seconds), goodput.total, goodput.parts, goodput.failures, goodput.seconds_between_failures
        ),
        nodes=make_nodes(usage),
        ranks=make_ranks(usage),
        checkpoints=[
            CheckpointDetails(step, best is not None and best[0] == step)
            for step in (checkpoint_step(path.name) for path in reversed(found))
            if step is not None
        ],
        commands=_commands(record),
    )


def _commands(record: Record) -> dict[str, str]:
    """Return what to type to do more with a run."""
    name, details = record.folder.key, record.details
    commands = {"logs": f"paceline logs {quote(name)}"}
    earlier = [each for each in details.get("earlier", []) if isinstance(each, dict)]
    command, cwd = [*earlier, details][0].get("command"), details.get("cwd")  # later ones may only resume it
    if isinstance(command, list) and not _is_trial(record):
        place = f"cd {quote(cwd)} && " if isinstance(cwd, str) else ""
        commands = {"repeat": place + command_line(map(str, command)), **commands}
    if not record.is_over:
        commands["cancel"] = f"paceline cancel {quote(name)}"
    elif record.status != DONE:
        commands["resume"] = resume_command(record.folder, job=record.job)
    return commands


def _is_trial(record: Record) -> bool:
    return record.folder.path.parent.name == TRIALS
