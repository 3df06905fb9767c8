"""The W&B run of a Paceline run: the same one after every stop, resume and requeue."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.contract import wandb_server
from paceline.contract.run_folder import FAILED, STOPPED, STOPPED_EXIT, RunFolder, write_atomically
from paceline.runtime.console import note
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line
from paceline.runtime.trackers.wandb_points import RUN_ID, SWEEP_ID

MAX_ID_LENGTH = 120


class WandbTracker:
    """Logs the lines of metrics.jsonl to one W&B run; with `wandb_all_processes`, to one per rank
    in one group.
    """

    def __init__(self) -> None:
        import wandb

        self.id = ""
        self.tracking = Tracking()
        self.run: Any = None
        self._wandb: Any = wandb
        self._info = RunInfo()

    def start(self, run: RunInfo) -> None:
        self._info = run
        # Ranks have logs of their own; capturing output would replace the script's sys.stdout. Of
        # wandb's messages we want only the run's address.
        settings = {"console": "off", "quiet": True}
        options = self._choose_options(run)
        options["settings"] = {
            key: value
            for key, value in settings.items()
            if f"WANDB_{key.upper()}" not in os.environ
        }
        self.run = init_run(self._wandb, options, self.tracking, send=run.run_id)
        # W&B's own step counter rejects steps that are repeated after a resume.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float | str]) -> None:
        self.run.log({"step": step, **values})

    def configure(self, values: Mapping[str, Any]) -> None:
        """Add the script's own settings to the config of the run."""
        self.run.config.update(values, allow_val_change=True)

    def finish(self, status: str) -> None:
        info = self._info
        if info.best is not None and info.folder is not None and info.rank == 0:
            name, mode = info.best
            values = _logged_values(RunFolder(info.folder).metrics, name)
            if values:
                best = max(values) if mode == "max" else min(values)
                self.run.summary[f"best/{name}"] = best
        code = 1 if status == FAILED else 0
        if status == STOPPED and SWEEP_ID not in os.environ:
            # W&B shows the run as preempted. Not in a sweep: W&B would give the trial to another
            # agent.
            self.run.mark_preempting()
            code = STOPPED_EXIT
        self.run.finish(exit_code=code)

    def _choose_options(self, run: RunInfo) -> dict[str, Any]:
        """Return arguments for `wandb.init`: from the settings, else the environment, else the
        run's own names.
        """
        tracking = self.tracking
        project = tracking.wandb_project or os.environ.get("WANDB_PROJECT") or run.project
        name = os.environ.get("WANDB_NAME") or run.run_id
        group = tracking.wandb_group or os.environ.get("WANDB_RUN_GROUP")
        options: dict[str, Any] = {
            "id": self.id,
            "resume": "allow",
            "name": name or None,
            "entity": tracking.wandb_entity,
            "project": project or "paceline",
            "group": group or run.experiment or None,
            "config": {
                **run.params,
                "paceline": {**run.config, "run_id": run.run_id, "attempt": run.attempt},
            },
            "allow_val_change": True,
        }
        if tracking.wandb_all_processes and run.world_size > 1:
            options["group"] = group or self.id
            options["id"] = rank_name(self.id, run.rank)
            options["name"] = rank_name(name or self.id, run.rank)
        if run.trackers_folder is not None:
            run.trackers_folder.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(run.trackers_folder)
        return options


def init_run(wandb: Any, options: dict[str, Any], tracking: Tracking, *, send: str) -> Any:
    """Call `wandb.init`: offline, with one note, if there is no key, no network or no service.

    `send` is the run that `paceline sync` sends later.
    """
    problem = ""
    if not options.get("mode"):
        options["mode"], problem = wandb_server.choose_mode(os.environ, tracking.wandb_mode)
    try:
        run = wandb.init(**options)
    except (wandb.Error, OSError) as error:
        if options["mode"] != wandb_server.ONLINE:
            raise
        problem = first_line(error)
        run = wandb.init(**{**options, "mode": wandb_server.OFFLINE})
    if problem:
        later = f"; send it later: paceline sync {send}" if send else ""
        note(f"W&B is offline: {problem}; the run is in {Path(run.dir).parent}{later}")
    return run


def choose_id(run: RunInfo, environ: Mapping[str, str]) -> str:
    """Return the id of the W&B run: a sweep agent's, or the Paceline run's, or one that the folder
    keeps for the next start.
    """
    known = environ.get(RUN_ID) or re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id)[:MAX_ID_LENGTH]
    if known or run.trackers_folder is None:
        return known or secrets.token_hex(4)
    path = run.trackers_folder / "wandb-id"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(4))
        return path.read_text(encoding="utf-8")
    except OSError:  # a full disk, or a folder of somebody else: it must not end the training
        return secrets.token_hex(4)


def rank_name(name: str, rank: int) -> str:
    return f"{name}-rank-{rank}"


def _logged_values(metrics: Path, name: str) -> list[float]:
    """Return what all attempts have logged as a metric, without NaN."""
    found = []
    with open(metrics, encoding="utf-8", errors="replace") as file:
        for line in file:
            # a killed attempt may have left half a line
            if f'"{name}"' in line and line.endswith("}\n"):
                value = json.loads(line).get(name)
                if isinstance(value, (int, float)):  # NaN and infinities are text
                    found.append(value)
    return found
