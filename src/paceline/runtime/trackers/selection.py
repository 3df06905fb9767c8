"""From what was asked to the trackers of this rank."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.settings import Settings
from paceline.runtime.trackers.base import RunInfo, Tracker, Tracking, first_line, warn
from paceline.runtime.trackers.feed import Feed, patience_for

WANDB, TENSORBOARD = "wandb", "tensorboard"
# Settings of a run that its trackers are told. No command line, and no variables: both may hold secrets.
TOLD = ("nodes", "nproc", "gpus", "style", "program", "is_module")
SHOWN = {WANDB: "W&B", TENSORBOARD: "TensorBoard"}


@dataclass
class Feeds:
    """The trackers of a rank, each with its thread: those of the numbers of all ranks, and of this rank's own."""

    common: list[Feed] = field(default_factory=list)
    own: list[Feed] = field(default_factory=list)
    wandb: Any = None  # the WandbTracker, if there is one
    wandb_feed: Feed | None = None

    def begin(self) -> None:
        for feed in (*self.common, *self.own):
            feed.begin()
        if self.wandb_feed is not None:
            _stand_in().share(self.wandb_run)

    def ids(self) -> dict[str, str]:
        """What a checkpoint keeps, so that the tracker's run goes on with the run."""
        return {WANDB: self.wandb.id} if self.wandb is not None and self.wandb.id else {}

    def close(self, status: str, *, urgent: bool = False) -> None:
        """Let all of them finish, for as long as this end allows."""
        if self.wandb_feed is not None:
            _stand_in().share(None)
        feeds, patience = (*self.common, *self.own), patience_for(status, urgent=urgent)
        for feed in feeds:
            feed.end(status)
        until = time.monotonic() + patience
        for feed in feeds:
            feed.wait(until, patience=patience)

    def wandb_run(self) -> Any:
        """The live W&B run; None on ranks that have none. Waits until it has begun."""
        if self.wandb_feed is None:
            return None
        self.wandb_feed.started.wait()
        return self.wandb.run


def _stand_in() -> Any:
    from paceline.runtime.trackers.wandb.module import STANDIN

    return STANDIN


def open_feeds(
    context: LaunchContext,
    settings: Settings,
    identity: Identity,
    *,
    folder: RunFolder | None,
    given: Sequence[Tracker | str],
    store: Any,
) -> Feeds:
    """The trackers of a session, not yet begun."""
    launch_spec = context.launch_spec
    tracking = Tracking.of(launch_spec)
    config = {"world_size": identity.world_size, "seed": settings.seed, "precision": settings.precision}
    mode, _, metric = (settings.best or "").rpartition(":")
    info = RunInfo(
        run_id=launch_spec.run_id if launch_spec else "",
        project=launch_spec.project if launch_spec else "",
        experiment=launch_spec.experiment if launch_spec else "",
        folder=folder.path if folder else None,
        rank=identity.rank,
        world_size=identity.world_size,
        attempt=context.attempt,
        already=_size(folder.metrics) if folder else 0,
        params=dict(launch_spec.params) if launch_spec else {},
        config={**config, **({name: getattr(launch_spec, name) for name in TOLD} if launch_spec else {})},
        best=(metric, mode or "max") if metric else None,
    )
    return choose(tracking, given, info, store=store)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def choose(tracking: Tracking, given: Sequence[Tracker | str], info: RunInfo, *, store: Any = None) -> Feeds:
    """The trackers that this rank serves: rank 0 all of them, the others W&B where each has a run of its own."""
    wanted: list[Tracker | str] = [*given, *tracking.trackers]
    if tracking.wants_wandb:
        wanted.append(WANDB)
    if tracking.tensorboard:
        wanted.append(TENSORBOARD)
    if tracking.wandb is False:
        wanted = [each for each in wanted if each != WANDB]
    feeds = Feeds()
    everyone = tracking.wandb_all_processes and info.world_size > 1
    for each in _once(wanted):
        of_each_rank = each == WANDB and everyone
        if info.rank and not of_each_rank:
            continue
        name = SHOWN.get(each, each) if isinstance(each, str) else type(each).__name__
        tracker = _make(each, tracking) if isinstance(each, str) else each
        if tracker is None:
            continue
        feed = Feed(name, tracker, info)
        (feeds.own if of_each_rank else feeds.common).append(feed)
        if each == WANDB:
            feeds.wandb, feeds.wandb_feed = tracker, feed
            feeds.wandb.id = _agreed_id(info, store if of_each_rank else None)
    return feeds


def _agreed_id(info: RunInfo, store: Any) -> str:
    """The id of the W&B run; where ranks have one each, what their names begin with: rank 0 says it."""
    from paceline.runtime.trackers.wandb.run import choose_id

    if store is None:
        return choose_id(info, os.environ)
    if info.rank == 0:
        store.set("tracker/id", choose_id(info, os.environ))
    return str(store.get("tracker/id"), "utf-8")


def _once(wanted: list[Tracker | str]) -> list[Tracker | str]:
    return [each for number, each in enumerate(wanted) if not any(each is other for other in wanted[:number])]


def _make(name: str, tracking: Tracking) -> Tracker | None:
    """The tracker of that name; None, and one warning, when it cannot be had."""
    makers: dict[str, Callable[[], Any]] = {WANDB: lambda: _wandb(tracking), TENSORBOARD: _tensorboard}
    try:
        made = makers[name]() if name in makers else _named(name)
    except Exception as error:
        why, hint = f"{type(error).__name__}: {first_line(error)}", ""
        if isinstance(error, ModuleNotFoundError):
            why = f"there is no module {error.name!r} here"
            hint = f" (pip install {name})" if name in makers else ""
        warn(f"{SHOWN.get(name, name)} is left out: {why}{hint}; metrics.jsonl has all numbers")
        return None
    if not isinstance(made, Tracker):
        warn(f"{name} is left out: it has no start, log and finish; metrics.jsonl has all numbers")
        return None
    return made


def _wandb(tracking: Tracking) -> Any:
    from paceline.runtime.trackers.wandb.run import WandbTracker

    return WandbTracker(tracking)


def _tensorboard() -> Any:
    from paceline.runtime.trackers.tensorboard import TensorboardTracker

    return TensorboardTracker()


def _named(name: str) -> Any:
    """`package.module:Class`, made without arguments."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError('expected "package.module:Class", or one of wandb, tensorboard')
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found()
