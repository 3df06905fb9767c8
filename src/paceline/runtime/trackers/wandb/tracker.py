"""The W&B run of a Paceline run: the same one after every stop, resume and requeue.

`python -m paceline.runtime.trackers.wandb.tracker RUN` logs what W&B lacks of a run that was
killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.contract import wandb_server
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import FAILED, STOPPED, STOPPED_EXIT, read_verdict
from paceline.runtime.console import note
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line
from paceline.runtime.trackers.wandb import service
from paceline.runtime.trackers.wandb.agent import RUN_ID, SWEEP_ID
from paceline.runtime.trackers.wandb.offline import OfflineFiles

MAX_ID_LENGTH = 120


class WandbTracker:
    """Logs the lines of metrics.jsonl to one W&B run; with `wandb_all_processes`, to one per rank
    in one group.
    """

    def __init__(self, tracking: Tracking) -> None:
        import wandb

        self.id = ""
        self.run: Any = None
        self._wandb: Any = wandb
        self._tracking = tracking
        self._options: dict[str, Any] = {}
        self._best: tuple[str, str, float] | None = None
        self._has_restarted = False
        self._offline: OfflineFiles | None = None
        self._metrics_offset = 0  # bytes of metrics.jsonl from earlier attempts
        self._logged = 0  # lines since then
        self._abandoned = threading.Event()

    # -- Tracker
    # -----------------------------------------------------------------------------------------

    def start(self, run: RunInfo) -> None:
        mode, problem = wandb_server.choose_mode(os.environ, self._tracking.wandb_mode)
        self._options = self._choose_options(run)
        if run.folder is not None and not self._is_per_rank(run):
            self._offline, self._metrics_offset = (
                OfflineFiles(run.folder, self.id),
                run.metrics_offset,
            )
        try:
            self._begin(mode, silent=bool(problem))
        except Exception as error:
            if mode == wandb_server.ONLINE:
                mode, problem = wandb_server.OFFLINE, first_line(error)
            self._restart(mode)
        if problem:
            note(offline_note(problem, _folder_of(self.run), run.run_id))
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
        self._logged += 1

    def configure(self, values: Mapping[str, Any]) -> None:
        """Add the script's own settings to the config of the run."""
        self._options["config"] |= values  # for a restart
        try:
            self.run.config.update(values, allow_val_change=True)
        except Exception:
            self._restart()

    def finish(self, status: str) -> None:
        try:
            self._end(status)
        except Exception:
            # time is short: the next start or `paceline sync` logs what is missing
            if status == STOPPED:
                service.forget_service(self._wandb, broken=True)
                return
            self._restart()
            self._end(status)
        service.forget_service(self._wandb)

    def abandon(self) -> None:
        """Release the tracker's thread, which hangs in a call of wandb's. Another thread calls
        this.
        """
        self._abandoned.set()
        service.kill_service()
        service.run_within(0.3, lambda: service.forget_service(self._wandb, broken=True))

    # -- starting and ending
    # -----------------------------------------------------------------------------

    def _choose_options(self, run: RunInfo) -> dict[str, Any]:
        """Return arguments for `wandb.init`: from the settings, else the environment, else the
        run's own names.
        """
        tracking = self._tracking
        self.id = self.id or choose_id(run, os.environ)
        name = os.environ.get("WANDB_NAME") or run.run_id or None
        group = tracking.wandb_group or os.environ.get("WANDB_RUN_GROUP")
        options: dict[str, Any] = {
            "id": self.id,
            "resume": "allow",
            "name": name,
            "entity": tracking.wandb_entity,
            "project": tracking.wandb_project
            or os.environ.get("WANDB_PROJECT")
            or run.project
            or "paceline",
            "group": group or run.experiment or None,
            "config": {
                **run.params,
                "paceline": {**run.config, "run_id": run.run_id, "attempt": run.attempt},
            },
            "allow_val_change": True,
        }
        if self._is_per_rank(run):
            options["group"] = group or self.id
            options["id"] = rank_name(self.id, run.rank)
            options["name"] = rank_name(name or self.id, run.rank)
        if run.trackers_folder is not None:
            run.trackers_folder.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(run.trackers_folder)
        return {key: value for key, value in options.items() if value is not None}

    def _is_per_rank(self, run: RunInfo) -> bool:
        return self._tracking.wandb_all_processes and run.world_size > 1

    def _begin(self, mode: str, *, silent: bool = False) -> None:
        # Ranks have logs of their own; capturing output would replace the script's sys.stdout. Of
        # wandb's messages we want only the run's address, and none if we print our own note.
        settings: dict[str, Any] = {"console": "off", "quiet": True, "silent": silent}
        settings = {
            key: value
            for key, value in settings.items()
            if f"WANDB_{key.upper()}" not in os.environ
        }
        self._options["mode"] = mode
        offline = self._offline
        if offline is not None and (mode != wandb_server.OFFLINE or not offline.set_aside()):
            offline = None
        self.run = self._wandb.init(**self._options, settings=self._wandb.Settings(**settings))
        if self._abandoned.is_set():
            raise TimeoutError("it started too late")
        # W&B's own step counter rejects steps that are repeated after a resume.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        if offline is not None:
            for step, values in offline.missing_lines(
                until=self._metrics_offset, more=self._logged
            ):
                self.run.log({"step": step, **values})

    def _restart(self, mode: str | None = None) -> None:
        """Start W&B's service again, once: a signal to all processes of a job kills it, too."""
        service.kill_service()  # or what is left of it
        service.forget_service(self._wandb, broken=True)
        if self._has_restarted or self._abandoned.is_set():
            raise ConnectionError("its service ended")
        self._has_restarted = True
        time.sleep(1.1)  # W&B names its folders by the second
        self._begin(mode or self._options["mode"], silent=True)

    def _end(self, status: str) -> None:
        if self._best is not None and not math.isnan(self._best[2]):
            self.run.summary[f"best/{self._best[0]}"] = self._best[2]
        code = 1 if status == FAILED else 0
        if status == STOPPED and SWEEP_ID not in os.environ:
            # W&B shows the run as preempted. Not in a sweep: W&B would give the trial to another
            # agent.
            self.run.mark_preempting()
            code = STOPPED_EXIT
        folder, offline = _folder_of(self.run), _is_offline(self.run)
        self.run.finish(exit_code=code)
        if self._offline is not None:
            self._offline.close(folder if offline else None)


# -- names
# ---------------------------------------------------------------------------------------------


def choose_id(run: RunInfo, environ: Mapping[str, str]) -> str:
    """Return the id of the W&B run: a sweep agent's, the one in the newest checkpoint, or the
    Paceline run's id.

    Only the run's own checkpoints count, not the one that `start_from` names.
    """
    return (
        environ.get(RUN_ID)
        or _saved_id(run.folder)
        or _clean_id(run.run_id)
        or secrets.token_hex(4)
    )


def _saved_id(folder: Path | None) -> str:
    """Return the W&B id in the newest checkpoint of a run folder, or an empty string."""
    if folder is None:
        return ""
    from paceline.contract.checkpoint import list_checkpoints, read_marker
    from paceline.errors import CheckpointError

    for path in list_checkpoints(RunFolder(folder).checkpoints):
        try:
            meta = read_marker(path).meta
        except CheckpointError:
            continue
        ids = meta.get("trackers") if isinstance(meta, dict) else None
        return str(ids.get("wandb", "")) if isinstance(ids, dict) else ""
    return ""


def _clean_id(name: str) -> str:
    """Return a run's name as an id that W&B accepts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:MAX_ID_LENGTH]


def rank_name(name: str, rank: int) -> str:
    return f"{name}-rank-{rank}"


# -- summary
# -------------------------------------------------------------------------------------------


def better(mode: str, best: float, value: Any) -> float:
    if not isinstance(value, (int, float)) or math.isnan(value):
        return best
    return value if math.isnan(best) or (value > best if mode == "max" else value < best) else best


def best_so_far(run: RunInfo, name: str, mode: str) -> tuple[str, str, float]:
    """Return the best value that earlier attempts logged."""
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
    """Return `.../wandb/offline-run-<time>-<id>`, the parent of the run's folder for files."""
    files = getattr(run, "dir", None)
    return Path(files).parent if files else None


def _is_offline(run: Any) -> bool:
    return bool(getattr(run, "offline", False) or getattr(run, "disabled", False))


def offline_note(problem: str, folder: Path | None, run_id: str) -> str:
    """Return the note that a run is offline, and how to send it."""
    send = f"; send it later: paceline sync {run_id}" if run_id else ""
    return f"W&B is offline: {problem}; the run is in {folder}{send}"


# -- after a kill
# --------------------------------------------------------------------------------------


def complete(folder: Path) -> bool:
    """Write what W&B lacks of a killed run as one more offline part. Return whether anything was
    missing.
    """
    run = RunFolder(folder)
    launch_spec = LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    tracking = replace(Tracking.of(launch_spec), wandb_mode=wandb_server.OFFLINE)
    size = run.metrics.stat().st_size if run.metrics.exists() else 0
    info = RunInfo(
        run_id=launch_spec.run_id,
        project=launch_spec.project,
        experiment=launch_spec.experiment,
        folder=folder,
        metrics_offset=size,
        world_size=launch_spec.world_size,
        attempt=len(run.attempts()),
        params=dict(launch_spec.params),
    )
    files = OfflineFiles(folder, choose_id(info, {}))
    if tracking.wandb_all_processes or not files.is_torn():
        return False
    if next(files.missing_lines(until=size), None) is None:
        return False
    tracker = WandbTracker(tracking)
    tracker.start(info)
    verdicts = [read_verdict(attempt.verdict) for attempt in run.attempts()]
    tracker.finish((verdicts[-1] if verdicts else None) or FAILED)
    return True


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
