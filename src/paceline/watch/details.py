"""Everything about one run: what `paceline show`, `paceline top`, the browser and a report show."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.checkpoint.score import find_best
from paceline.contract.files.foreign_records import read_object
from paceline.contract.run_folder import AttemptFolder
from paceline.contract.verdict import read_verdict
from paceline.plan.quote import command_line
from paceline.watch.config import flatten, read_config
from paceline.watch.failures import failure_text, read_failure
from paceline.watch.goodput import compute_goodput, find_end, read_events
from paceline.watch.node_usage import NodeUsage, read_node_usage
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record

MAX_NODES = 64


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None if the launch itself failed."""

    rank: int | None
    host: str
    text: str
    where: str
    traceback: str


@dataclass(frozen=True)
class AttemptDetails:
    """One try at running the ranks."""

    number: int
    job_start: str
    verdict: str  # done, stopped or failed; empty while it runs, or if it was killed
    failure: Failure | None


@dataclass(frozen=True)
class Span:
    """A part of a run's time line."""

    kind: str  # a category of goodput
    began: float
    ended: float
    attempt: int


@dataclass(frozen=True)
class GoodputDetails:
    """Where the time went. The seconds sum to the wall time."""

    seconds: dict[str, float]
    total: float


@dataclass(frozen=True)
class RankDetails:
    """A rank, as its agent saw it last."""

    rank: int
    host: str
    step: int
    seconds_per_step: float
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


@dataclass(frozen=True)
class CheckpointDetails:
    step: int
    is_best: bool


@dataclass(frozen=True)
class RunDetails:
    """A run with everything that its folder tells."""

    overview: Overview
    command: str
    config: dict[str, Any]  # flat: `model.width`
    settings: dict[str, Any]  # the resolved tables of paceline.toml and flags
    code: dict[str, Any]
    attempts: list[AttemptDetails]
    timeline: list[Span]
    goodput: GoodputDetails
    nodes: list[NodeDetails]
    ranks: list[RankDetails]
    checkpoints: list[CheckpointDetails]
    commands: dict[str, str]  # what to type: repeat, resume, logs, cancel

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_details(record: Record) -> RunDetails:
    """Read all that a run's folder tells, except its metrics and logs."""
    folder, details = record.folder, record.details
    events = read_events(folder.events)
    shares = compute_goodput(events, find_end(folder, events) if record.is_over else time.time())
    command = details.get("command")
    found = find_checkpoints(folder.path)
    best = find_best(found)
    usage = read_node_usage(folder, max_nodes=MAX_NODES)
    return RunDetails(
        overview=make_overview(record),
        command=command_line(map(str, command)) if isinstance(command, list) else "",
        config=flatten(read_config(folder)),
        settings=dict(details.get("spec") or {}),
        code=dict(details.get("code") or {}),
        attempts=[_attempt(each) for each in folder.attempts()],
        timeline=[],
        goodput=GoodputDetails(dict(shares.seconds), shares.total),
        nodes=[_node(each) for each in usage],
        ranks=[],
        checkpoints=[
            CheckpointDetails(step, best is not None and best[0] == step)
            for step in (checkpoint_step(path.name) for path in reversed(found))
            if step is not None
        ],
        commands={"logs": f"paceline logs {record.run_id}"},
    )


def _attempt(attempt: AttemptFolder) -> AttemptDetails:
    try:
        job_start = attempt.start.read_text(encoding="utf-8").split()[0]
    except (OSError, ValueError, IndexError):
        job_start = ""
    failure = read_failure(attempt)
    return AttemptDetails(
        attempt.number, job_start, read_verdict(attempt.verdict) or "", _failure(attempt, failure) if failure else None
    )


def _failure(attempt: AttemptFolder, failure: dict[str, Any]) -> Failure:
    rank, traceback = failure.get("rank"), ""
    if rank is not None:
        try:
            traceback = str(read_object(attempt.error(rank)).get("traceback", ""))
        except (OSError, ValueError):
            traceback = ""
    return Failure(rank, str(failure.get("host", "")), failure_text(failure), str(failure.get("where", "")), traceback)


def _node(usage: NodeUsage) -> NodeDetails:
    gpus = usage.details.get("gpus")
    cores, memory = usage.details.get("cores"), usage.details.get("memory_total")
    return NodeDetails(
        usage.node, usage.host, cores if isinstance(cores, int) else None, memory if isinstance(memory, int) else None,
        [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else [], usage.samples,
    )  # fmt: skip
