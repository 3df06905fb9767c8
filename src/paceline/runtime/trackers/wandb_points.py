"""Points of a W&B sweep, which wandb's own agent requests one at a time.

`python -m paceline.runtime.trackers.wandb_points SWEEP FILE` requests one point for a whole run and
writes it to FILE, with the variables that make the `wandb.init` of that run the one that the sweep
expects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically

ENTITY, PROJECT, RESUME = "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RESUME"
RUN_ID, SWEEP_ID, PARAM_PATH = "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"


def read_point(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the hyperparameters that an agent set for this process; empty without an agent."""
    path = environ.get(PARAM_PATH)
    if not path:
        return {}
    import yaml  # type: ignore[import-untyped]  # installed with wandb

    table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return {
        key: entry["value"]
        for key, entry in table.items()
        if isinstance(entry, dict) and "value" in entry and key not in ("wandb_version", "_wandb")
    }


def main(argv: Sequence[str]) -> None:
    """Request one point of SWEEP and write it to FILE, or `{"point": null}` if the sweep has no
    more.

    This needs a process of its own, because wandb's agent changes the environment and leaves
    threads behind.
    """
    import wandb

    sweep, file = argv[0], Path(argv[1])
    *owners, _ = sweep.split("/")
    names = dict(zip((PROJECT, ENTITY), reversed(owners), strict=False))
    names[RESUME] = "allow"  # a requeued trial continues its W&B run
    # wandb calls the function with the point's variables in `os.environ`
    asked: list[dict[str, str]] = []
    wandb.agent(sweep, function=lambda: asked.append(dict(os.environ)), count=1)
    answer: dict[str, Any] = {"point": None}
    if asked:
        (environ,) = asked
        if environ.get(PARAM_PATH):  # the ranks may run in another folder
            environ[PARAM_PATH] = str(Path(environ[PARAM_PATH]).absolute())
        known = (RUN_ID, SWEEP_ID, PARAM_PATH)
        variables = {name: environ[name] for name in known if environ.get(name)}
        answer = {"point": read_point(environ), "variables": {**names, **variables}}
    write_atomically(file, json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
