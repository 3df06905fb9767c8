"""From the tracking settings to the trackers of this rank."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.settings import LaunchContext, Settings, best_metric
from paceline.runtime.trackers.base import RunInfo, Tracker, Tracking, first_line
from paceline.runtime.trackers.thread import FINISH_TIMEOUTS, URGENT_FINISH_TIMEOUT, TrackerThread

WANDB, TENSORBOARD = "wandb", "tensorboard"
# What trackers may know of the launch spec. Not the command line or the environment: both may hold
# secrets.
CONFIG_KEYS = ("nodes", "nproc", "gpus", "style", "program", "is_module")
DISPLAY_NAMES = {WANDB: "W&B", TENSORBOARD: "TensorBoard"}
BUILT_IN = {
    WANDB: "paceline.runtime.trackers.wandb_run:WandbTracker",
    TENSORBOARD: "paceline.runtime.trackers.tensorboard:TensorboardTracker",
}


@dataclass
class Trackers:
    """The trackers of a rank, each with its thread."""

    common: list[TrackerThread] = field(default_factory=list)  # get metrics averaged over all ranks
    own: list[TrackerThread] = field(default_factory=list)  # get this rank's own metrics
    wandb: TrackerThread | None = None  # one of them

    def start(self) -> None:
        for thread in (*self.common, *self.own):
            thread.start()
        if self.wandb is not None:
            _wandb_module().share(self.wandb_run)

    def configure(self, values: dict[str, Any]) -> None:
        """Send the script's own settings to W&B."""
        if self.wandb is not None:
            self.wandb.configure(values)

    def close(self, status: str, *, urgent: bool = False) -> None:
        """Let all trackers finish, for as long as this status allows."""
        if self.wandb is not None:
            _wandb_module().share(None)
        threads = (*self.common, *self.own)
        timeout = URGENT_FINISH_TIMEOUT if urgent else FINISH_TIMEOUTS[status]
        for thread in threads:
            thread.finish(status)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(deadline, timeout=timeout)

    def wandb_run(self) -> Any:
        """Return the live W&B run once it has started; None on ranks without one."""
        if self.wandb is None:
            return None
        self.wandb.started.wait()
        return self.wandb.tracker.run


def _wandb_module() -> Any:
    from paceline.runtime.trackers.wandb_module import WANDB_MODULE

    return WANDB_MODULE


def open_trackers(
    context: LaunchContext,
    settings: Settings,
    identity: Identity,
    *,
    folder: RunFolder | None,
    given: Sequence[Tracker | str],
    store: Any,
) -> Trackers:
    """Return the trackers of a session, not yet started: all of them on rank 0, on other ranks W&B
    if each rank has a W&B run.
    """
    launch_spec = context.launch_spec
    tracking = Tracking.of(launch_spec)
    config = {
        "world_size": identity.world_size,
        "seed": settings.seed,
        "precision": settings.precision,
    }
    if launch_spec:
        config |= {name: getattr(launch_spec, name) for name in CONFIG_KEYS}
    info = RunInfo(
        run_id=launch_spec.run_id if launch_spec else "",
        project=launch_spec.project if launch_spec else "",
        experiment=launch_spec.experiment if launch_spec else "",
        folder=folder.path if folder else None,
        rank=identity.rank,
        world_size=identity.world_size,
        attempt=context.attempt,
        params=dict(launch_spec.params) if launch_spec else {},
        config=config,
        best=best_metric(settings.best),
    )
    requested = [*given, *tracking.trackers]
    if tracking.wants_wandb:
        requested.append(WANDB)
    if tracking.tensorboard:
        requested.append(TENSORBOARD)
    trackers = Trackers()
    for number, each in enumerate(requested):
        per_rank = each == WANDB and tracking.wandb_all_processes and identity.is_distributed
        is_off = each == WANDB and tracking.wandb is False
        if is_off or each in requested[:number] or (identity.rank and not per_rank):
            continue
        name = DISPLAY_NAMES.get(each, each) if isinstance(each, str) else type(each).__name__
        tracker = _make(each, name) if isinstance(each, str) else each
        if tracker is None:
            continue
        thread = TrackerThread(name, tracker, info)
        (trackers.own if per_rank else trackers.common).append(thread)
        if each == WANDB:
            trackers.wandb = thread
            thread.tracker.tracking = tracking
            thread.tracker.id = _wandb_id(info, store if per_rank else None)
    return trackers


def _wandb_id(info: RunInfo, store: Any) -> str:
    """Return the id of the W&B run. If each rank has a run, rank 0 chooses the prefix of all their
    ids.
    """
    from paceline.runtime.trackers.wandb_run import choose_id

    if store is None:
        return choose_id(info, os.environ)
    if info.rank == 0:
        store.set("tracker/id", choose_id(info, os.environ))
    return str(store.get("tracker/id"), "utf-8")


def _make(requested: str, name: str) -> Tracker | None:
    """Import `package.module:Class` and construct it without arguments; None, with one warning, if
    that fails.
    """
    try:
        module, colon, attribute = BUILT_IN.get(requested, requested).partition(":")
        if not colon:
            raise ValueError('expected "package.module:Class", "wandb" or "tensorboard"')
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            hint = f" (pip install {requested})" if requested in BUILT_IN else ""
            why = f"no module named {error.name!r}{hint}"
        note(f"{name} is disabled: {why}; metrics.jsonl has all values")
        return None
    if not isinstance(made, Tracker):
        note(f"{name} is disabled: it lacks start, log or finish; metrics.jsonl has all values")
        return None
    return made
