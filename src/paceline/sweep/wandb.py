"""Sweeps whose points W&B chooses: their files, their settings, and W&B's service before a
submission.

W&B's agents are tasks of a job array here, and its points are trials.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.contract import wandb_server
from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.job import Job
from paceline.spec.settings import explain
from paceline.spec.sweep import SweepFile, with_flags
from paceline.spec.training_tables import SweepTable
from paceline.spec.typed_flags import Flag
from paceline.spec.wandb_sweep import WandbFile, load_wandb_file

KEY, ADDRESS = "WANDB_API_KEY", "WANDB_BASE_URL"
DEFAULT_AGENTS = 4  # with more at once, the search learns less from each
ALTERNATIVE = 'or let Paceline search, which needs no service: sampler = "tpe" in a sweep.toml'

# -- files and settings
# --------------------------------------------------------------------------------


def read_wandb_file(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, WandbFile]:
    """Read W&B's own sweep.yml, overridden by flags."""
    file = load_wandb_file(path)
    values = {
        "name": clean_name(file.name),
        "metric": file.metric,
        "direction": file.direction,
        "script": file.program,
        "args": file.args,
        "arguments": file.arguments,
    }
    try:
        table = SweepTable.model_validate(values)
    except ValidationError as problem:
        raise explain(problem, where=str(path), prefix=("sweep",), root=SweepTable) from None
    return SweepFile(path, with_flags(table, typed), {}), file


def sweep_of_script(path: Path, typed: Sequence[Flag]) -> SweepFile:
    """Return the sweep of a script alone: the points come from an existing W&B sweep."""
    table = with_flags(SweepTable(script=path.name), typed)
    if table.wandb_sweep is None:
        raise UsageError(
            f"{path} is a script; a sweep also needs points to try.",
            hint="Name a sweep.toml, or a W&B sweep with --wandb-sweep ENTITY/PROJECT/ID.",
        )
    return SweepFile(path, table, {})


def choose_name(file: SweepFile, sweep: str) -> str:
    """Return the sweep's name. A script's name alone would not tell its W&B sweeps apart."""
    if file.table.name is not None or file.path.suffix != ".py":
        return file.name
    return clean_name(f"{file.name}-{sweep.rpartition('/')[2]}")


def clean_name(name: str) -> str:
    """Return a name that can be a folder's."""
    allowed = "".join(letter if letter.isalnum() or letter in "._-+=@" else "-" for letter in name)
    return allowed.lstrip(".-") or "wandb"


def with_wandb(job: Job, environ: Mapping[str, str]) -> Job:
    """Give a job what its trials need to reach W&B: the service's address, the key, and tracking
    by W&B.
    """
    environment, tracking = job.environment, job.tracking
    if KEY in environ and KEY not in (*environment.secrets, *environment.variables):
        environment = environment.model_copy(update={"secrets": (*environment.secrets, KEY)})
    if environ.get(ADDRESS):
        variables = {ADDRESS: environ[ADDRESS], **environment.variables}
        environment = environment.model_copy(update={"variables": variables})
    if tracking.wandb is None:  # the search learns only from what trials log to W&B
        tracking = tracking.model_copy(update={"wandb": True})
    tables = job.tables.model_copy(update={"environment": environment, "tracking": tracking})
    return replace(job, tables=tables)


def count_agents(table: SweepTable, path: Path, *, points: int | None) -> tuple[int, int]:
    """Return the number of agents, and of all their trials. `points` is the size of the search, if
    known.
    """
    agents = table.parallel or (DEFAULT_AGENTS if points is None else min(DEFAULT_AGENTS, points))
    if table.seeds != 1:
        raise SpecError(
            f"seeds in {path} is {table.seeds}, but each point of a W&B sweep is one run.",
            hint="Make the seed a parameter of the W&B sweep.",
        )
    if table.count is None and points is None:
        raise SpecError(
            "This W&B sweep needs the number of points per agent.",
            hint=f"Add --count 10 for ten points on each of {agents} agents (--parallel).",
        )
    each = table.count or math.ceil((points or 0) / agents)
    return agents, agents * each if points is None else min(points, agents * each)


# -- the service
# ---------------------------------------------------------------------------------------


def check_reachable(environ: Mapping[str, str]) -> None:
    """Raise before anything is queued if agents could not reach W&B: they would all wait in
    vain.
    """
    message = f"This sweep gets its points from W&B at {wandb_server.base_url(environ)}, but"
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise EnvironmentProblem(
            f"{message} WANDB_MODE is {environ['WANDB_MODE']!r}.",
            hint=f"Unset WANDB_MODE, {ALTERNATIVE}",
        )
    if problem := wandb_server.unreachable(environ):
        raise EnvironmentProblem(
            f"{message} {problem}.",
            hint="Use a machine with network access, set WANDB_BASE_URL or https_proxy, "
            f"{ALTERNATIVE}",
        )
    if problem := wandb_server.missing_key(environ):
        raise EnvironmentProblem(f"{message} {problem}.", hint=wandb_server.KEY_HINT)


def check_name(sweep: str) -> None:
    """Raise unless this is a sweep's id, alone or with its project and entity."""
    if not re.fullmatch(r"([^/\s]+/){0,2}[^/\s]+", sweep):
        raise UsageError(
            f"Invalid W&B sweep {sweep!r}.", hint="Write ENTITY/PROJECT/ID, as on the sweep's page."
        )


def create_sweep(config: dict[str, Any], variables: Mapping[str, str]) -> str:
    """Create a W&B sweep and return its ENTITY/PROJECT/ID, as far as entity and project are
    known.
    """
    try:
        import wandb
    except ImportError:
        raise EnvironmentProblem(
            "A W&B sweep needs wandb, which is not installed here.",
            hint='Install it with `pip install "paceline[wandb]"`.',
        ) from None
    entity = config.get("entity") or os.environ.get("WANDB_ENTITY")
    project = config.get("project") or os.environ.get("WANDB_PROJECT")
    try:
        with contextlib.redirect_stdout(io.StringIO()), _wandb_variables(variables):
            created = wandb.sweep(config, entity=entity, project=project)
    except Exception as problem:  # wandb's errors have no public base class
        reason = next(
            (line for line in str(problem).splitlines() if line.strip()), type(problem).__name__
        )
        raise EnvironmentProblem(
            f"W&B did not create the sweep: {reason}",
            hint="Check WANDB_API_KEY, or run `wandb login`.",
        ) from None
    return "/".join(part for part in (entity if project else None, project, str(created)) if part)


@contextlib.contextmanager
def _wandb_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set WANDB_ variables for the body: wandb takes its key from the environment, or else saves
    it at home.
    """
    before = dict(os.environ)
    os.environ.update(
        {name: value for name, value in variables.items() if name.startswith("WANDB_")}
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
