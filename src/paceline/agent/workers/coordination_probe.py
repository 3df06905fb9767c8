"""Finds out whether a script knows that it runs as one of several ranks.

A script that never reads its rank forms no process group: it runs in as many independent copies as
there are ranks. The probe watches reads of `os.environ` until the first one that counts, which ends
it. Optimizer steps without one mean that the copies train, for now: a later read still counts. Time
alone means nothing: a script may prepare data for hours before it forms a group.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from paceline.agent.health import heartbeat
from paceline.contract.heartbeat_file import (
    COORDINATED,
    ENDED_ALONE,
    SPAWNS_ALONE,
    TRAINS_ALONE,
    UNKNOWN,
)
from paceline.contract.launcher_variables import TABLE

# from the first optimizer step: a script may try a few steps before it forms its group
SECONDS = 30.0
STEPS = 3

# Whoever reads one of these knows of other ranks. `init_process_group` reads the address, even if
# it is given the rank.
VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "NODE_RANK",
}
VARIABLES |= {"MASTER_ADDR", "MASTER_PORT"}
VARIABLES |= {
    name
    for row in TABLE
    for name in (row.rank, row.world_size, row.local_rank, row.local_world_size)
    if name
}

# Libraries that read these variables, or copy all of them, without doing anything about the other
# ranks. When they do, they form a process group.
UNCONCERNED = (
    "accelerate",
    "datasets",
    "huggingface_hub",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "matplotlib",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "tqdm",
    "transformers",
    "triton",
    "wandb",
)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


class CoordinationProbe:
    """The probe of one process. `is_rank` is false for a process that starts the ranks of its node
    itself.
    """

    def __init__(self, heartbeat_file: str, local_rank: int, *, is_rank: bool) -> None:
        self._heartbeat_file, self._local_rank, self._is_rank = heartbeat_file, local_rank, is_rank
        self._pid = os.getpid()
        self._found = UNKNOWN
        self._hooked = False
        self._variables: dict[Any, Any] = {}
        self._last_read: object = None
        self._steps = 0
        self._first_step = 0.0
        self._names = {os.environ.encodekey(name) for name in VARIABLES}

    def install(self) -> None:
        # two views of the same variables
        environs: list[Any] = [os.environ, getattr(os, "environb", os.environ)]
        self._variables = watched = _WatchedVariables(environs[0]._data)
        _WatchedVariables.probe = self
        for environ in environs:
            environ._data = watched
        self._hook_torch()

    def finish(self) -> None:
        """Write down what is certain at the end of the script."""
        if self._found == SPAWNS_ALONE:
            return
        # Other programs that it started may have read their ranks.
        if self._is_rank and (self._steps or not _has_started_processes()):
            self._report(ENDED_ALONE)
        elif self._steps:
            self._report(TRAINS_ALONE)

    def check_read(self, key: object, frame: FrameType) -> None:
        """Called before each read of a variable."""
        last_read, self._last_read = self._last_read, key
        if key in self._names and _is_concerned(frame, in_copy=self._follows(key, last_read)):
            self._report(COORDINATED)
        elif not self._hooked:
            self._hook_torch()

    def _follows(self, key: object, last_read: object) -> bool:
        """Return whether a variable comes right after the one that was read last, as in a loop
        over all of them.
        """
        names = list(self._variables)
        return key in names[1:] and names[names.index(key) - 1] == last_read

    def _report(self, coordination: int) -> None:
        if self._found in (COORDINATED, coordination):
            return
        self._found = coordination
        heartbeat.write_coordination(
            self._heartbeat_file, local_rank=self._local_rank, coordination=coordination
        )
        if coordination == COORDINATED:
            with suppress(AttributeError):  # from now on, reads cost what they always do
                del _WatchedVariables.__getitem__

    def _hook_torch(self) -> None:
        """Watch for optimizer steps and mp.spawn as soon as the script has imported torch."""
        optimizer, spawn = (
            sys.modules.get(f"torch.{name}")
            for name in ("optim.optimizer", "multiprocessing.spawn")
        )
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        original = getattr(spawn, "start_processes", None)
        if (
            register is None
            or original is None
            or not hasattr(sys.modules.get("torch"), "distributed")
        ):
            return
        self._hooked = True
        register(self._count_step)

        def start_processes(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid:
                self._report(SPAWNS_ALONE if self._is_rank else COORDINATED)
            return original(*args, **kwargs)

        for module in (spawn, sys.modules["torch.multiprocessing"]):
            module.start_processes = start_processes  # type: ignore[union-attr]

    def _count_step(self, *_: object) -> None:
        if self._found == COORDINATED or os.getpid() != self._pid:
            return
        distributed = sys.modules["torch"].distributed
        if distributed.is_available() and distributed.is_initialized():
            self._report(COORDINATED)
            return
        self._steps += 1
        self._first_step = self._first_step or time.monotonic()
        if self._steps >= STEPS and time.monotonic() - self._first_step >= SECONDS:
            self._report(TRAINS_ALONE)


class _WatchedVariables(dict[Any, Any]):
    """The variables behind `os.environ`."""

    probe: CoordinationProbe

    def __getitem__(self, key: Any) -> Any:
        self.probe.check_read(key, sys._getframe(1))
        return super().__getitem__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a pickled os.environ is like any other


def _is_concerned(frame: FrameType | None, *, in_copy: bool) -> bool:
    """Return whether the code that reads a variable does so to find out about ranks.

    The standard library reads a single one for its caller, as in `os.path.expandvars`, but copies
    all for itself.
    """
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    while frame is not None and _is_standard(frame):
        if in_copy:
            return False
        frame = frame.f_back
    if frame is None or not _is_library(frame):
        return True
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in UNCONCERNED or module.startswith("torch.distributed")


def _is_library(frame: FrameType) -> bool:
    return any(folder in frame.f_code.co_filename for folder in _LIBRARIES)


def _is_standard(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_STANDARD_LIBRARY, "<frozen")) and not _is_library(
        frame
    )


def _has_started_processes() -> bool:
    """Return whether this process has, or had, children."""
    if resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
