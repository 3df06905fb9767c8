"""Points that W&B chooses: each trial of such a sweep requests its own when it starts.

One process requests it for the whole run before any rank starts. The answer is in the sweep's
folder, where a resumed trial finds it.
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

TIMEOUT = 300.0  # seconds for an answer
NO_MORE = "the search has no more points"


@dataclass(frozen=True)
class TrialPython:
    """The trial's own Python, which has wandb, and environment variables that this process may
    lack.
    """

    executable: str
    variables: Mapping[str, str]


def request_point(sweep: SweepFolder, name: str, group: int, python: TrialPython) -> dict[str, Any]:
    """Return a group's point and the variables of its W&B run. Raises `NoPoint` if the sweep has
    no more.
    """
    path = sweep.chosen_point(group)
    if not path.exists():
        if sweep.search_exhausted.exists():
            raise NoPoint(NO_MORE)
        _run_agent(name, path, python)
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if answer.get("point") is None:
        path.replace(sweep.search_exhausted)
        raise NoPoint(NO_MORE)
    return answer


def tracking_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the project and entity of the sweep's runs, which override `[tracking]`."""
    names = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY"}
    return {key: variables[name] for key, name in names.items() if name in variables}


def _run_agent(name: str, path: Path, python: TrialPython) -> None:
    path.parent.mkdir(exist_ok=True)
    log = path.with_suffix(".log")
    home = str(Path(paceline.__file__).parent.parent)  # the zip, in a job
    known = os.environ.get("PYTHONPATH")
    environ = {
        **os.environ,
        **python.variables,
        "PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home,
        # where its agent writes the point: all nodes see this folder
        "WANDB_DIR": str(path.parent),
        "WANDB_CONSOLE": "off",
    }
    argv = [python.executable, "-m", "paceline.runtime.trackers.wandb_points", name, str(path)]
    with open(log, "ab") as output:
        try:
            code = subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=TIMEOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code or not path.exists():
        problem = f"did not respond within {TIMEOUT:.0f} s" if code == -1 else "returned no point"
        raise LaunchError(
            f"The W&B sweep {name} {problem}: {_last_line(log)}", hint=f"See the log: {log}"
        )
    log.unlink()


def _last_line(log: Path) -> str:
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1] if lines else "no output"
