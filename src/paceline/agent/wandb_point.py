"""Points that W&B's service chooses: each trial of such a sweep asks for its own when it begins.

One process asks for the whole run, whatever its nodes and ranks, before any of them is started: the answer stands
in the sweep's folder, and a trial that is resumed finds it there.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.contract.sweep_folder import NoPoint, SweepFolder
from paceline.errors import LaunchError

PATIENCE = 300.0  # seconds for an answer


@dataclass(frozen=True)
class Asking:
    """Who asks: the trial's own Python, which has wandb, with variables that this process may lack."""

    python: str
    variables: Mapping[str, str]


def ask_wandb(sweep: SweepFolder, name: str, group: int, asking: Asking) -> dict[str, Any]:
    """The point of a group, and the variables of its W&B run. `NoPoint` when the service has no more."""
    path = sweep.asked(group)
    if not path.exists():
        if sweep.asked_for_all.exists():
            raise NoPoint
        _ask(name, path, asking)
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if told.get("point") is None:
        path.replace(sweep.asked_for_all)
        raise NoPoint
    return told


def place_in_wandb(variables: Mapping[str, str]) -> dict[str, str]:
    """A run of the sweep lies where the sweep does, whatever `[tracking]` says."""
    names = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY"}
    return {key: variables[name] for key, name in names.items() if name in variables}


def _ask(name: str, path: Path, asking: Asking) -> None:
    path.parent.mkdir(exist_ok=True)
    log = path.with_suffix(".log")
    home = str(Path(paceline.__file__).parent.parent)  # the zip, in a job
    known = os.environ.get("PYTHONPATH")
    environ = {
        **os.environ,
        **asking.variables,
        "PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home,
        "WANDB_DIR": str(path.parent),  # where its agent puts the point: all nodes see this folder
        "WANDB_CONSOLE": "off",
    }
    words = [asking.python, "-m", "paceline.runtime.trackers.wandb.agent", name, str(path)]
    with open(log, "ab") as output:
        try:
            code = subprocess.run(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=PATIENCE
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    if code or not path.exists():
        how = f"gave no answer within {PATIENCE:.0f} s" if code == -1 else "gave no point"
        raise LaunchError(f"the W&B sweep {name} {how}: {_last_line(log)}", hint=f"all that was said: {log}")
    log.unlink()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"
