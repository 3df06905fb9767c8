"""Sweeps whose points W&B chooses: their files, their settings, and W&B's service before a
submission.

W&B's agents are tasks of a job array here, and its points are trials.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from paceline.contract import wandb_server
from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.job import Job
from paceline.spec.settings import check, show
from paceline.spec.sweep import SweepFile, require_no_secret, with_flags
from paceline.spec.training_tables import SweepTable
from paceline.spec.typed_flags import Flag

SUFFIXES = (".yml", ".yaml")
# W&B's ways to pass values to the script other than `--key value`.
_UNSUPPORTED = (
    "${args_no_hyphens}",
    "${args_json}",
    "${args_json_file}",
    "${args_no_boolean_flags}",
)
KEY, ADDRESS = "WANDB_API_KEY", "WANDB_BASE_URL"
DEFAULT_AGENTS = 4  # with more at once, the search learns less from each
ALTERNATIVE = 'or let Paceline search, which needs no service: sampler = "tpe" in a sweep.toml'

# -- files and settings
# --------------------------------------------------------------------------------


class Metric(BaseModel):
    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


class WandbFile(BaseModel):
    """W&B's own sweep.yml: the parts that describe a trial. The search itself is W&B's."""

    program: str
    method: str
    parameters: dict[str, Any]
    metric: Metric | None = None
    command: list[str] = ["${program}", "${args}"]
    name: str = ""
    run_cap: int | None = None


def read_wandb_file(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, dict[str, Any]]:
    """Read a sweep.yml, overridden by flags. Return it with all that it has, for W&B."""
    config = _read(path)
    file = check(config, path, WandbFile)
    _check_secrets(file.parameters, path)
    if "${program}" not in file.command or set(file.command) & set(_UNSUPPORTED):
        raise SpecError(
            f"Invalid command = {show(file.command)} in {path}.",
            hint="Use [..., ${program}, ${args}]: "
            "${args} passes parameters as --key value; run.params and wandb.config have them, "
            "too.",
        )
    args = file.command[file.command.index("${program}") + 1 :]
    values = {
        "name": clean_name(file.name or path.stem),
        "metric": file.metric and file.metric.name,
        "direction": file.metric.goal if file.metric else "minimize",
        "script": file.program,
        "args": [arg for arg in args if arg != "${args}"],
        "arguments": "options" if "${args}" in args else "none",
    }
    table = check(values, path, SweepTable)
    return SweepFile(path, with_flags(table, typed), {}), config


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]  # installed with wandb
    except ImportError:
        raise EnvironmentProblem(
            f"{path} is a W&B sweep, but wandb is not installed here.",
            hint='Install it with `pip install "paceline[wandb]"`.',
        ) from None
    try:
        config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        reason = " ".join(str(problem).split())
        raise SpecError(f"{path} is not valid YAML: {reason}", hint="Fix the file.") from None
    return config


def _check_secrets(parameters: Mapping[str, Any], path: Path) -> None:
    for name, each in parameters.items():
        if isinstance(each, dict):
            require_no_secret(name, [each.get("values"), each.get("value")], f"{path}: parameters:")
            _check_secrets(each.get("parameters") or {}, path)


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


def count_agents(table: SweepTable, path: Path, *, cap: int | None) -> tuple[int, int]:
    """Return the number of agents, and of all their trials. `cap` is the most that W&B allows."""
    agents = table.parallel or min(DEFAULT_AGENTS, cap or DEFAULT_AGENTS)
    if table.seeds != 1:
        raise SpecError(
            f"seeds in {path} is {table.seeds}, but each point of a W&B sweep is one run.",
            hint="Make the seed a parameter of the W&B sweep.",
        )
    most = agents * table.count if table.count else cap
    if most is None:
        raise SpecError(
            "This W&B sweep needs the number of points per agent.",
            hint=f"Add --count 10 for ten points on each of {agents} agents (--parallel).",
        )
    return agents, min(most, cap or most)


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
    # wandb takes its key from the environment, or else saves it at home
    os.environ.update({key: value for key, value in variables.items() if key.startswith("WANDB_")})
    entity = config.get("entity") or os.environ.get("WANDB_ENTITY")
    project = config.get("project") or os.environ.get("WANDB_PROJECT")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
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
