"""A sweep whose points W&B's service chooses, in the terms of any other: its agents are tasks, its points trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from paceline.errors import SpecError, UsageError
from paceline.spec import Flag, Job
from paceline.spec.sweep import SweepFile, SweepTable, with_flags
from paceline.spec.validation_errors import explain
from paceline.spec.wandb_sweep import WandbFile, load_wandb_file

KEY, ADDRESS = "WANDB_API_KEY", "WANDB_BASE_URL"
AGENTS = 4  # unless said: more at once, and a search has learned less from each


def file_of_wandb(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, WandbFile]:
    """W&B's own sweep.yml. How many points each agent asks for may follow from it."""
    told = load_wandb_file(path)
    values = {
        "name": clean(told.name), "metric": told.metric, "direction": told.direction, "script": told.program,
        "args": told.args, "arguments": told.arguments,
    }  # fmt: skip
    try:
        table = SweepTable.model_validate(values)
    except ValidationError as problem:
        raise explain(problem, where=str(path), prefix=("sweep",), root=SweepTable) from None
    return SweepFile(path, with_flags(table, typed), {}), told


def file_of_script(path: Path, typed: Sequence[Flag]) -> SweepFile:
    """A script alone: what it is to try, the service knows."""
    table = with_flags(SweepTable(script=path.name), typed)
    if table.wandb_sweep is None:
        raise UsageError(
            f"{path} is a script, and nothing says what to try",
            hint="name a sweep.toml, or a sweep of W&B: --wandb-sweep ENTITY/PROJECT/ID",
        )
    return SweepFile(path, table, {})


def name_of(file: SweepFile, sweep: str) -> str:
    """A script may be tried by many sweeps: its name alone would not tell them apart."""
    if file.table.name is not None or file.path.suffix != ".py":
        return file.name
    return clean(f"{file.name}-{sweep.rpartition('/')[2]}")


def with_wandb(job: Job, environ: Mapping[str, str]) -> Job:
    """What a trial needs to ask for its point and to tell of it: the service's address, a key, and a tracker."""
    environment, tracking = job.environment, job.tracking
    if KEY in environ and KEY not in (*environment.secrets, *environment.variables):
        environment = environment.model_copy(update={"secrets": (*environment.secrets, KEY)})
    if environ.get(ADDRESS):
        variables = {ADDRESS: environ[ADDRESS], **environment.variables}
        environment = environment.model_copy(update={"variables": variables})
    if tracking.wandb is None:  # a trial that logs nothing there would tell the search nothing
        tracking = tracking.model_copy(update={"wandb": True})
    tables = job.tables.model_copy(update={"environment": environment, "tracking": tracking})
    return replace(job, tables=tables)


def shares(table: SweepTable, path: Path, *, points: int | None) -> tuple[int, int]:
    """How many agents, and how many trials they have in all."""
    agents = table.parallel or (AGENTS if points is None else min(AGENTS, points))
    if table.seeds != 1:
        raise SpecError(
            f"{path}: seeds is {table.seeds}, and each point of a W&B sweep is one run of it",
            hint="make the seed a parameter of the W&B sweep",
        )
    if table.count is None and points is None:
        raise SpecError(
            f"{path}: nothing says how many points each agent asks for",
            hint=f"give --count 10: {agents} agents at a time (--parallel), ten points each",
        )
    each = table.count or math.ceil((points or 0) / agents)
    return agents, agents * each if points is None else min(points, agents * each)


def clean(name: str) -> str:
    """A name that can be a folder's."""
    return (
        "".join(letter if letter.isalnum() or letter in "._-+=@" else "-" for letter in name).lstrip(".-")
        or "wandb"
    )
