"""A W&B run for a Paceline run: the same one after every stop, resume and requeue."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.contract import wandb_server
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import FAILED, STOPPED, STOPPED_EXIT
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line, warn
from paceline.runtime.trackers.wandb import service
from paceline.runtime.trackers.wandb.agent import RUN_ID, SWEEP_ID
from paceline.runtime.trackers.wandb.offline import KeptFiles

LONGEST_ID = 120


class WandbTracker:
    """One W&B run, fed by the lines of metrics.jsonl; with `all_processes`, one for each rank, in one group."""

    def __init__(self, tracking: Tracking) -> None:
        import wandb

        self.id = ""
        self.run: Any = None
        self._wandb: Any = wandb
        self._tracking = tracking
        self._options: dict[str, Any] = {}
        self._best: tuple[str, str, float] | None = None
        self._has_restarted = False
        self._kept: KeptFiles | None = None
        self._already = 0  # bytes of metrics.jsonl from before
        self._taken = 0  # lines since
        self._abandoned = threading.Event()

    # -- the three methods -----------------------------------------------------------------------------

    def start(self, run: RunInfo) -> None:
        mode, problem = wandb_server.choose_mode(os.environ, self._tracking.wandb_mode)
        self._options = self._choose(run)
        if run.folder is not None and not self._is_one_of_many(run):
            self._kept, self._already = KeptFiles(run.folder, self.id), run.already
        try:
            self._begin(mode, silent=bool(problem))
        except Exception as error:
            if mode == wandb_server.ONLINE:
                mode, problem = wandb_server.OFFLINE, first_line(error)
            self._restart(mode)
        if problem:
            send = f"; send it later: paceline sync {run.run_id}" if run.run_id else ""
            warn(f"W&B: {problem}: the run is kept in {_folder_of(self.run)}{send}")
        if run.best is not None:
            self._best = best_so_far(run, *run.best)

    def log(self, step: int, values: dict[str, float | str]) -> None:
        if self._best is not None:
            name, mode, best = self._best
            self._best = (name, mode, better(mode, best, values.get(name)))
        try:
            self.run.log({"step": step, **values})
        except Exception:
            self._restart()
            self.run.log({"step": step, **values})
        self._taken += 1

    def finish(self, status: str) -> None:
        try:
            self._end(status)
        except Exception:
            if status == STOPPED:  # time is short: the next start, or `paceline sync`, logs what is lacking
                service.forget_service(self._wandb, broken=True)
                return
            self._restart()
            self._end(status)
        service.forget_service(self._wandb)

    def abandon(self) -> None:
        """Called by another thread, while this one hangs in a call of wandb's."""
        self._abandoned.set()
        service.end_service()
        service.within(0.3, lambda: service.forget_service(self._wandb, broken=True))

    # -- how -------------------------------------------------------------------------------------------

    def _choose(self, run: RunInfo) -> dict[str, Any]:
        """Arguments of `wandb.init`: what was asked for, else the environment's, else the run's own names."""
        asked = self._tracking
        self.id = self.id or choose_id(run, os.environ)
        name = os.environ.get("WANDB_NAME") or run.run_id or None
        group = asked.wandb_group or os.environ.get("WANDB_RUN_GROUP")
        options: dict[str, Any] = {
            "id": self.id, "resume": "allow", "name": name, "entity": asked.wandb_entity,
            "project": asked.wandb_project or os.environ.get("WANDB_PROJECT") or run.project or "paceline",
            "group": group or run.experiment or None,
            "config": {**run.params, "paceline": {**run.config, "run_id": run.run_id, "attempt": run.attempt}},
            "allow_val_change": True,
        }  # fmt: skip
        if self._is_one_of_many(run):
            options["group"] = group or self.id
            options["id"] = rank_name(self.id, run.rank)
            options["name"] = rank_name(name or self.id, run.rank)
        if run.place is not None:
            run.place.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(run.place)
        return {key: value for key, value in options.items() if value is not None}

    def _is_one_of_many(self, run: RunInfo) -> bool:
        return self._tracking.wandb_all_processes and run.world_size > 1

    def _begin(self, mode: str, *, silent: bool = False) -> None:
        # What ranks print is in their logs; capturing it would change sys.stdout under the script. Of its own words
        # only the run's address is wanted; where we say what there is to say, none.
        settings: dict[str, Any] = {"console": "off", "quiet": True, "silent": silent}
        settings = {key: value for key, value in settings.items() if f"WANDB_{key.upper()}" not in os.environ}
        self._options["mode"] = mode
        kept = self._kept
        if kept is not None and (mode != wandb_server.OFFLINE or not kept.set_aside()):
            kept = None
        self.run = self._wandb.init(**self._options, settings=self._wandb.Settings(**settings))
        if self._abandoned.is_set():
            raise TimeoutError("it was started too late")
        # Steps that are done again after a resume would be refused by W&B's own count of them.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        if kept is not None:
            for step, values in kept.lines(until=self._already, more=self._taken):
                self.run.log({"step": step, **values})

    def _restart(self, mode: str | None = None) -> None:
        """Its service is gone: a signal to all processes of a job reaches it, too. Once, it is started again."""
        service.end_service()  # or what is left of it
        service.forget_service(self._wandb, broken=True)
        if self._has_restarted or self._abandoned.is_set():
            raise ConnectionError("its service has ended")
        self._has_restarted = True
        time.sleep(1.1)  # its folders are named by the second
        self._begin(mode or self._options["mode"], silent=True)

    def _end(self, status: str) -> None:
        if self._best is not None and not math.isnan(self._best[2]):
            self.run.summary[f"best/{self._best[0]}"] = self._best[2]
        code = 1 if status == FAILED else 0
        if status == STOPPED and SWEEP_ID not in os.environ:
            # Shown as preempted. Not in a sweep: its service would hand the trial to another agent.
            self.run.mark_preempting()
            code = STOPPED_EXIT
        folder, offline = _folder_of(self.run), _is_offline(self.run)
        self.run.finish(exit_code=code)
        if self._kept is not None:
            self._kept.close(folder if offline else None)


# -- names ---------------------------------------------------------------------------------------------


def choose_id(run: RunInfo, environ: Mapping[str, str]) -> str:
    """The id of the tracker's run: an agent's, that of the run's own newest checkpoint, or the run's own name.

    The checkpoint of another run, which `start_from` begins with, is never looked at.
    """
    return environ.get(RUN_ID) or saved_id(run.folder) or clean_id(run.run_id) or secrets.token_hex(4)


def saved_id(folder: Path | None) -> str:
    """What the newest checkpoint in the run folder says; empty when there is none that says it."""
    if folder is None:
        return ""
    from paceline.contract.checkpoint import marker
    from paceline.errors import CheckpointError

    for place in marker.checkpoints(RunFolder(folder).checkpoints):
        try:
            meta = marker.read(place).meta
        except CheckpointError:
            continue
        ids = meta.get("trackers") if isinstance(meta, dict) else None
        return str(ids.get("wandb", "")) if isinstance(ids, dict) else ""
    return ""


def clean_id(name: str) -> str:
    """A run's name as an id that W&B takes."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:LONGEST_ID]


def rank_name(name: str, rank: int) -> str:
    return f"{name}-rank-{rank}"


# -- summary -------------------------------------------------------------------------------------------


def better(mode: str, best: float, value: Any) -> float:
    if not isinstance(value, (int, float)) or math.isnan(value):
        return best
    return value if math.isnan(best) or (value > best if mode == "max" else value < best) else best


def best_so_far(run: RunInfo, name: str, mode: str) -> tuple[str, str, float]:
    """The best value that earlier attempts have written."""
    best = float("nan")
    if run.attempt > 1 and run.folder is not None:
        try:
            with open(RunFolder(run.folder).metrics, encoding="utf-8", errors="replace") as file:
                for line in file:
                    if f'"{name}"' in line and line.endswith("}\n"):
                        best = better(mode, best, json.loads(line).get(name))
        except (OSError, ValueError):
            pass
    return name, mode, best


def _folder_of(run: Any) -> Path | None:
    """`.../wandb/offline-run-<time>-<id>`: the parent of the folder for files."""
    found = getattr(run, "dir", None)
    return Path(found).parent if found else None


def _is_offline(run: Any) -> bool:
    return bool(getattr(run, "offline", False) or getattr(run, "disabled", False))
