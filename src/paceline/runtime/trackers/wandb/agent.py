"""Points of a W&B sweep, which wandb's own agent requests one at a time.

`run_points` runs in one process, which may train each point itself or pass it on to the other ranks
(`paceline.wandb.agent`). `python -m paceline.runtime.trackers.wandb.agent SWEEP FILE` requests one
point for a whole run and writes it to FILE: `Point.variables` make the `wandb.init` of that run the
one that the sweep expects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically

ENTITY, PROJECT, RESUME = "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RESUME"
RUN_ID, SWEEP_ID, PARAM_PATH = "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"
# makes wandb's agent stop after the first trial that fails
STOP_ON_FAILURE = "WANDB_AGENT_DISABLE_FLAPPING"


@dataclass(frozen=True)
class Point:
    """One trial of a W&B sweep: its run id and its hyperparameters."""

    run_id: str
    sweep: str
    values: dict[str, Any] = field(default_factory=dict)
    # the environment that its wandb.init needs
    variables: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Point:
        return cls(**json.loads(text))


def run_points(
    sweep: str,
    train: Callable[[Point], Any],
    *,
    count: int | None = None,
    project: str | None = None,
    entity: str | None = None,
) -> None:
    """Call `train` with each point until the sweep has no more or `count` are done.

    wandb calls it in a thread of its own, with the point's variables in `os.environ`, and reports
    to the service that the trial is alive. An exception in `train` stops the agent and is raised
    here.
    """
    import wandb

    failed: list[BaseException] = []

    def trial() -> None:
        try:
            train(current_point(os.environ))
        except BaseException as error:
            failed.append(error)
            # the agent only catches Exception
            raise RuntimeError(f"The trial failed: {error}") from error

    with _set_variable(STOP_ON_FAILURE, "true"):
        wandb.agent(sweep, function=trial, count=count, project=project, entity=entity)
    if failed:
        raise failed[0]


def current_point(environ: Mapping[str, str]) -> Point:
    """Return the point that an agent set for this process, or an empty one."""
    names = (RUN_ID, SWEEP_ID, PARAM_PATH)
    variables = {name: environ[name] for name in names if environ.get(name)}
    if PARAM_PATH in variables:  # a child process may run in another folder
        variables[PARAM_PATH] = str(Path(variables[PARAM_PATH]).absolute())
    values = read_values(variables.get(PARAM_PATH))
    return Point(variables.get(RUN_ID, ""), variables.get(SWEEP_ID, ""), values, variables)


def read_values(path: str | None) -> dict[str, Any]:
    """Return the hyperparameters in an agent's file; empty if it is missing or unreadable."""
    if not path:
        return {}
    import yaml  # type: ignore[import-untyped]  # installed with wandb

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
def _set_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the body: wandb's agent reads some settings only from
    there.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def main(argv: Sequence[str]) -> int:
    """Request one point of SWEEP and write it to FILE, or `{"point": null}` if the sweep has no
    more.

    This needs a process of its own, because wandb's agent changes the environment and leaves
    threads behind.
    """
    sweep, file = argv[0], Path(argv[1])
    *owners, _ = sweep.split("/")
    names = dict(zip((PROJECT, ENTITY), reversed(owners), strict=False))
    names[RESUME] = "allow"  # a requeued trial continues its W&B run

    def write(point: Point) -> None:
        record = {"point": point.values, "variables": {**names, **point.variables}}
        write_atomically(file, json.dumps(record) + "\n")

    run_points(sweep, write, count=1)
    if not file.exists():
        write_atomically(file, json.dumps({"point": None}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
