"""The W&B run of a Paceline run: the same one after every stop, resume and requeue."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.contract import wandb_server
from paceline.contract.foreign_records import read_objects
from paceline.contract.run_folder import FAILED, STOPPED, STOPPED_EXIT, RunFolder
from paceline.contract.sweep_folder import is_number
from paceline.runtime.console import note
from paceline.runtime.settings import LaunchContext
from paceline.runtime.trackers.base import RunInfo, first_line
from paceline.runtime.trackers.wandb_points import RUN_ID, SWEEP_ID


class WandbTracker:
    """Logs the lines of metrics.jsonl to one W&B run; with `wandb_all_processes`, to one per rank
    in one group.
    """

    def __init__(self) -> None:
        import wandb

        self.run: Any = None
        self._wandb: Any = wandb
        self._info = RunInfo()

    def start(self, run: RunInfo) -> None:
        self._info = run
        tracking = LaunchContext.read().tracking
        options: dict[str, Any] = {
            "id": choose_id(run),
            "resume": "allow",
            "name": os.environ.get("WANDB_NAME") or run.run_id or None,
            "config": {
                **run.params,
                "paceline": {**run.config, "run_id": run.run_id, "attempt": run.attempt},
            },
            "allow_val_change": True,
        }
        if tracking.get("wandb_all_processes") and run.world_size > 1:
            options["group"] = os.environ.get("WANDB_RUN_GROUP") or options["id"]
            options["id"] += f"-rank-{run.rank}"
            options["name"] += f"-rank-{run.rank}"
        # Ranks have logs of their own; capturing output would replace the script's sys.stdout. Of
        # wandb's messages we want only the run's address.
        settings = {"console": "off", "quiet": True}
        options["settings"] = {
            key: value
            for key, value in settings.items()
            if f"WANDB_{key.upper()}" not in os.environ
        }
        self.run = init_run(self._wandb, options, run, tracking)
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
            lines = read_objects(RunFolder(info.folder).metrics)  # of all attempts
            values = [line[name] for line in lines if is_number(line.get(name))]
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


def init_run(
    wandb: Any, given: Mapping[str, Any], run: RunInfo, tracking: Mapping[str, Any]
) -> Any:
    """Call `wandb.init`. `[tracking]` overrides what is given, and that the environment and the
    run's own names.

    It is offline, with one note, if there is no key, no network or no service.
    """
    options = {
        **given,
        "project": tracking.get("wandb_project")
        or given.get("project")
        or os.environ.get("WANDB_PROJECT")
        or run.project
        or None,
        "group": tracking.get("wandb_group")
        or given.get("group")
        or os.environ.get("WANDB_RUN_GROUP")
        or run.experiment
        or None,
        "entity": tracking.get("wandb_entity") or given.get("entity"),
    }
    if run.trackers_folder is not None and not options.get("dir"):
        run.trackers_folder.mkdir(parents=True, exist_ok=True)
        options["dir"] = str(run.trackers_folder)
    problem = ""
    if not options.get("mode"):
        options["mode"], problem = wandb_server.choose_mode(os.environ, tracking.get("wandb_mode"))
    try:
        live = wandb.init(**options)
    except (wandb.Error, OSError) as error:
        if options["mode"] != wandb_server.ONLINE:
            raise
        problem = first_line(error)
        live = wandb.init(**{**options, "mode": wandb_server.OFFLINE})
    if problem:
        later = f"; send it later: paceline sync {run.run_id}" if run.run_id else ""
        note(f"W&B is offline: {problem}; the run is in {Path(live.dir).parent}{later}")
    return live


def choose_id(run: RunInfo) -> str | None:
    """Return the id of the W&B run: a sweep agent's, or the Paceline run's. None lets W&B choose
    one.
    """
    return os.environ.get(RUN_ID) or re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id) or None
