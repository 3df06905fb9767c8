"""Points of a W&B sweep: asked for by wandb's own agent, carried out one at a time.

`each_point` runs in one process. That process may carry a point out by itself, hand it to its peers
(`paceline.wandb.agent`), or start a whole run for it: `Point.variables` make the `wandb.init` of that run
the trial that the sweep expects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_ID, SWEEP_ID, PARAM_PATH = "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"
END_AT_FAILURE = "WANDB_AGENT_DISABLE_FLAPPING"  # wandb's agent then ends with the first trial that fails


@dataclass(frozen=True)
class Point:
    """One trial: the run id that the sweep knows it by, and its hyper-parameters."""

    run_id: str
    sweep: str
    values: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(
        default_factory=dict
    )  # what its wandb.init must find in the environment


def each_point(
    sweep: str,
    carry_out: Callable[[Point], Any],
    *,
    count: int | None = None,
    project: str | None = None,
    entity: str | None = None,
) -> None:
    """Ask for points until the sweep has none or `count` are done, and call `carry_out` with each.

    It is called in a thread of wandb's, while the agent tells the service that the trial is alive; the variables of
    the point stand in `os.environ` meanwhile. An error in it ends the agent, and is raised here.
    """
    import wandb

    failed: list[BaseException] = []

    def trial() -> None:
        try:
            carry_out(current_point(os.environ))
        except BaseException as error:
            failed.append(error)
            raise RuntimeError(f"the trial failed: {error}") from error  # an Exception: the agent must see it

    with _variable(END_AT_FAILURE, "true"):
        wandb.agent(sweep, function=trial, count=count, project=project, entity=entity)
    if failed:
        raise failed[0]


def current_point(environ: Mapping[str, str]) -> Point:
    """The point that an agent has set for this process; without one, a point of no values."""
    names = (RUN_ID, SWEEP_ID, PARAM_PATH)
    variables = {name: environ[name] for name in names if environ.get(name)}
    if PARAM_PATH in variables:  # a child may run in another folder
        variables[PARAM_PATH] = str(Path(variables[PARAM_PATH]).absolute())
    values = read_values(variables.get(PARAM_PATH))
    return Point(variables.get(RUN_ID, ""), variables.get(SWEEP_ID, ""), values, variables)


def read_values(path: str | None) -> dict[str, Any]:
    """The hyper-parameters in an agent's file; none where there is no file or it cannot be read."""
    if not path:
        return {}
    import yaml  # type: ignore[import-untyped]  # it comes with wandb

    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError):
        return {}
    return {
        key: entry["value"]
        for key, entry in table.items()
        if isinstance(entry, dict) and "value" in entry and key not in ("wandb_version", "_wandb")
    }


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """wandb's agent is told some things by the environment only."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
