"""The trackers of this rank, each with a thread of its own, so that training never waits for one,
and one that hangs doesn't delay the others.
"""

from __future__ import annotations

import importlib
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import LineWriter
from paceline.contract.run_folder import DONE, FAILED, STOPPED, RunFolder
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.settings import LaunchContext, Settings, best_metric
from paceline.runtime.trackers.base import RunInfo, Tracker, first_line

WANDB = "wandb"
# What trackers may know of the launch spec. Not the command line or the environment: both may hold
# secrets.
CONFIG_KEYS = ("nodes", "nproc", "gpus", "style", "program", "is_module")
BUILT_IN = {
    WANDB: ("W&B", "paceline.runtime.trackers.wandb_run:WandbTracker"),
    "tensorboard": ("TensorBoard", "paceline.runtime.trackers.tensorboard:TensorboardTracker"),
}
# Seconds for all trackers together to finish after training. At a stop, they are taken out of the
# job's grace period; after an error, the other ranks wait.
FINISH_TIMEOUTS = {DONE: 30.0, STOPPED: 15.0, FAILED: 5.0}
URGENT_FINISH_TIMEOUT = 0.5  # the job is being killed, and the verdict must still be written
SPECIAL_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class TrackerThread(threading.Thread):
    """One tracker and its thread. `append` takes whole lines of JSON, as `LineWriter.append`
    does.
    """

    def __init__(self, name: str, tracker: Tracker, info: RunInfo) -> None:
        super().__init__(name=name, daemon=True)
        self.is_set_up = threading.Event()  # also set if its start failed
        self.tracker: Any = tracker
        self._info = info
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def append(self, text: str) -> None:
        self.call(self._log, text)

    def call(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method in the thread, after what it has to do so far."""
        if self.is_alive():
            self._calls.put(partial(method, *args))

    def finish(self, status: str) -> None:
        """Let the tracker finish once it has taken all lines."""
        self.call(self.tracker.finish, status)
        self._calls.put(None)

    def _log(self, text: str) -> None:
        for line in text.splitlines():
            self.tracker.log(*parse_line(line))

    def run(self) -> None:
        # Signals go to the main thread. Whatever this thread starts (a tracker's service) inherits
        # the mask.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(
                signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
            )
        try:
            self.tracker.start(self._info)
            self.is_set_up.set()
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:
            kind = type(error).__name__
            note(
                f"{self.name} gets no more values: {kind}: {first_line(error)}; metrics.jsonl "
                "continues"
            )
        finally:
            self.is_set_up.set()


@dataclass
class Trackers:
    """The trackers of a rank."""

    common: list[TrackerThread] = field(default_factory=list)  # get metrics averaged over all ranks
    own: list[TrackerThread] = field(default_factory=list)  # get this rank's own metrics
    wandb: TrackerThread | None = None  # one of them

    def start(self) -> None:
        for thread in (*self.common, *self.own):
            thread.start()
        self._share(self.wandb_run)

    def configure(self, values: dict[str, Any]) -> None:
        """Send the script's own settings to W&B."""
        if self.wandb is not None:
            self.wandb.call(self.wandb.tracker.configure, values)

    def wandb_run(self) -> Any:
        """Return the live W&B run once it has started, or an object that accepts every call."""
        if self.wandb is not None:
            self.wandb.is_set_up.wait()
            if self.wandb.tracker.run is not None:
                return self.wandb.tracker.run
        from paceline.runtime.trackers.wandb_module import NoopRun

        return NoopRun()

    def close(self, status: str, *, urgent: bool = False) -> None:
        """Let all trackers finish, for as long as this status allows."""
        self._share(None)
        threads = (*self.common, *self.own)
        timeout = URGENT_FINISH_TIMEOUT if urgent else FINISH_TIMEOUTS[status]
        for thread in threads:
            thread.finish(status)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                note(f"{thread.name} did not finish within {timeout:g} s: giving up on it")

    def _share(self, run: Callable[[], Any] | None) -> None:
        """Have `paceline.wandb` use the session's W&B run, if there is one."""
        if self.wandb is not None:
            from paceline.runtime.trackers.wandb_module import WANDB_MODULE

            WANDB_MODULE.share(run)


class ForwardedMetrics(LineWriter):
    """metrics.jsonl, which rank 0 writes, and whose lines also go to trackers."""

    def __init__(self, path: Path | None, threads: list[TrackerThread]) -> None:
        super().__init__(path)
        self._threads = threads

    def append(self, text: str) -> bool:
        for thread in self._threads:
            thread.append(text)
        return super().append(text)


def parse_line(line: str) -> tuple[int, dict[str, float | str]]:
    """Return a line's step and its values, with nan and inf as numbers."""
    values: dict[str, Any] = json.loads(line)
    step = int(values.pop("step"))
    for rank, ratio in values.pop("stragglers", {}).items():
        values[f"stragglers/{rank}"] = ratio
    return step, {name: SPECIAL_NUMBERS.get(value, value) for name, value in values.items()}


def open_trackers(
    context: LaunchContext,
    settings: Settings,
    identity: Identity,
    *,
    folder: RunFolder | None,
    given: Sequence[Tracker | str],
) -> Trackers:
    """Return the trackers of a session, not yet started: all of them on rank 0, on other ranks W&B
    if each rank has a W&B run.
    """
    launch_spec = context.launch_spec
    tracking = context.tracking
    config = {
        "world_size": identity.world_size,
        "seed": settings.seed,
        "precision": settings.precision,
    }
    if launch_spec:
        config |= {name: getattr(launch_spec, name) for name in CONFIG_KEYS}
    info = RunInfo.of(
        context,
        folder=folder and folder.path,
        rank=identity.rank,
        world_size=identity.world_size,
        config=config,
        best=best_metric(settings.best),
    )
    requested = [*given, *tracking.get("trackers", ())]
    if tracking.get("wandb", "wandb_project" in tracking):  # setting a project enables W&B
        requested.append(WANDB)
    if tracking.get("tensorboard"):
        requested.append("tensorboard")
    trackers = Trackers()
    for number, each in enumerate(requested):
        all_processes = each == WANDB and tracking.get("wandb_all_processes")
        per_rank = all_processes and identity.is_distributed
        is_off = each == WANDB and tracking.get("wandb") is False
        if is_off or each in requested[:number] or (identity.rank and not per_rank):
            continue
        name, tracker = _make(each) if isinstance(each, str) else (type(each).__name__, each)
        if tracker is None:
            continue
        thread = TrackerThread(name, tracker, info)
        (trackers.own if per_rank else trackers.common).append(thread)
        if each == WANDB:
            trackers.wandb = thread
    return trackers


def _make(requested: str) -> tuple[str, Tracker | None]:
    """Import `package.module:Class` and construct it without arguments. Returns its name for
    messages, and None, after one warning, if that fails.
    """
    name, path = BUILT_IN.get(requested, (requested, requested))
    try:
        module, colon, attribute = path.partition(":")
        if not colon:
            raise ValueError('expected "package.module:Class", "wandb" or "tensorboard"')
        made = getattr(importlib.import_module(module), attribute)()
        if not isinstance(made, Tracker):
            raise TypeError("it lacks start, log or finish")
        return name, made
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            hint = f" (pip install {requested})" if requested in BUILT_IN else ""
            why = f"no module named {error.name!r}{hint}"
        note(f"{name} is disabled: {why}; metrics.jsonl has all values")
        return name, None
