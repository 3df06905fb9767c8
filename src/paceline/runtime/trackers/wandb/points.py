"""Points of a W&B sweep, which wandb's own agent requests one at a time.

`run_points` runs in one process, which may train each point itself or pass it on to the other ranks
(`paceline.wandb.agent`). `python -m paceline.runtime.trackers.wandb.points SWEEP FILE` requests one
point for a whole run and writes it to FILE: `Point.variables` make the `wandb.init` of that run the
one that the sweep expects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically

ENTITY, PROJECT, RESUME = "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RESUME"
RUN_ID, SWEEP_ID, PARAM_PATH = "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"
# makes wandb's agent stop after the first trial that fails
STOP_ON_FAILURE = "WANDB_AGENT_DISABLE_FLAPPING"


@dataclass(frozen=True)
class Point:
    """One trial of a W&B sweep: its hyperparameters, and the environment that its wandb.init
    needs.
    """

    values: dict[str, Any]
    variables: dict[str, str]


def run_points(sweep: str, train: Callable[[Point], Any], **options: Any) -> None:
    """Call `train` with each point until the sweep has no more or `count` are done. Takes the
    options of `wandb.agent`.

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

    # wandb's agent reads this setting only from the environment
    os.environ[STOP_ON_FAILURE] = "true"
    try:
        wandb.agent(sweep, function=trial, **options)
    finally:
        del os.environ[STOP_ON_FAILURE]
    if failed:
        raise failed[0]


def current_point(environ: Mapping[str, str]) -> Point:
    """Return the point that an agent set for this process, or an empty one."""
    names = (RUN_ID, SWEEP_ID, PARAM_PATH)
    variables = {name: environ[name] for name in names if environ.get(name)}
    if PARAM_PATH not in variables:
        return Point({}, variables)
    path = Path(variables[PARAM_PATH]).absolute()  # a child process may run in another folder
    variables[PARAM_PATH] = str(path)
    import yaml  # type: ignore[import-untyped]  # installed with wandb

    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = {
        key: entry["value"]
        for key, entry in table.items()
        if isinstance(entry, dict) and "value" in entry and key not in ("wandb_version", "_wandb")
    }
    return Point(values, variables)


def main(argv: Sequence[str]) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1:])
