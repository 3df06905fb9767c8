"""Sweeps whose points W&B chooses: their settings, and W&B's service before a submission.

W&B's agents are tasks of a job array here, and its points are trials.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.contract import wandb_server
from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.job import Job
from paceline.spec.training_tables import SweepTable

KEY, ADDRESS = "WANDB_API_KEY", "WANDB_BASE_URL"
DEFAULT_AGENTS = 4  # with more at once, the search learns less from each
ALTERNATIVE = 'or let Paceline search, which needs no service: sampler = "tpe" in a sweep.toml'


def with_wandb(job: Job, environ: Mapping[str, str]) -> Job:
    """Give a job what its trials need to reach W&B: the service's address, the key, and tracking
    by W&B.
    """
    environment, tracking = job.environment, job.tables.tracking
    if KEY in environ and KEY not in (*environment.secrets, *environment.variables):
        environment = environment.model_copy(update={"secrets": (*environment.secrets, KEY)})
    if environ.get(ADDRESS):
        variables = {ADDRESS: environ[ADDRESS], **environment.variables}
        environment = environment.model_copy(update={"variables": variables})
    if tracking.wandb is None:  # the search learns only from what trials log to W&B
        tracking = tracking.model_copy(update={"wandb": True})
    tables = job.tables.model_copy(update={"environment": environment, "tracking": tracking})
    return replace(job, tables=tables)


def count_agents(table: SweepTable, path: Path) -> tuple[int, int]:
    """Return the number of agents, and of all their trials."""
    agents = table.parallel or DEFAULT_AGENTS
    if table.seeds != 1:
        raise SpecError(
            f"seeds in {path} is {table.seeds}, but each point of a W&B sweep is one run.",
            hint="Make the seed a parameter of the W&B sweep.",
        )
    if table.count is None:
        raise SpecError(
            "This W&B sweep needs the number of points per agent.",
            hint=f"Add --count 10 for ten points on each of {agents} agents (--parallel).",
        )
    return agents, agents * table.count


def check_name(sweep: str) -> None:
    """Raise unless this is a sweep's id, alone or with its project and entity."""
    if not re.fullmatch(r"([^/\s]+/){0,2}[^/\s]+", sweep):
        raise UsageError(
            f"Invalid W&B sweep {sweep!r}.", hint="Write ENTITY/PROJECT/ID, as on the sweep's page."
        )


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
