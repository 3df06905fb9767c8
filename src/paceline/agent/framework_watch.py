"""Notices which frameworks a rank imports, wherever the import is: in the script, in the project
or in a library; then delivers a stop signal to all ranks after the same optimizer step.

Handlers of frameworks communicate, or end the training at the next step. Ranks that got the signal
in different steps would wait for each other forever. So each rank signals itself: once every rank
knows of the request, rank 0 names the next step. No rank can finish that step before rank 0 has
begun it, so none misses it. With several optimizers, a step is a round of them: two may share a
backward pass, and then no rank waits for another between their steps.

A handler may only start a timer: the Trainer of Hugging Face acts three seconds later. Timers run
out in different steps on different ranks, so each rank waits for its own timer before it continues.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from paceline.agent.health import heartbeat
from paceline.contract.frameworks import PRESETS
from paceline.contract.heartbeat_file import AT_STEPS, HEADER, SIGNALLED, STEP_SIGNAL, TAKES_SIGNALS

MODULES = {
    module: number for number, preset in enumerate(PRESETS, start=1) for module in preset.modules
}


def watch_frameworks(heartbeat_file: str, local_rank: int) -> None:
    """From now on, tell the agent about frameworks that this process imports, and about those it
    already has.
    """
    watch = FrameworkWatch(heartbeat_file, local_rank)
    for module in MODULES.keys() & sys.modules.keys():
        watch.report(module)
    sys.meta_path.insert(0, watch)


class FrameworkWatch:
    """Asked first for every module that is not imported yet; it never finds one."""

    def __init__(self, heartbeat_file: str, local_rank: int) -> None:
        self._heartbeat_file, self._local_rank, self._pid = heartbeat_file, local_rank, os.getpid()
        self._is_first = True
        self._steps: CommonStep | None = None  # to be installed as soon as torch is imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if os.getpid() == self._pid:
            if self._steps is not None and self._steps.install():
                self._steps = None
            if name in MODULES:
                self.report(name)
        return None

    def report(self, module: str) -> None:
        heartbeat.write_framework(
            self._heartbeat_file, local_rank=self._local_rank, number=MODULES[module]
        )
        if self._is_first and os.path.exists(self._heartbeat_file):
            self._is_first = False
            steps = CommonStep(self._heartbeat_file, self._local_rank)
            self._steps = None if steps.install() else steps


KNOWN, STEP = "paceline/stop/known", "paceline/stop/step"  # keys of the process group's store
LONGEST_TIMER = 10.0  # seconds; one that takes longer does not decide when the rank saves


class CommonStep:
    """Counts the optimizer steps of one rank. Without a request, a step costs about a
    microsecond.
    """

    def __init__(self, heartbeat_file: str, local_rank: int) -> None:
        with open(heartbeat_file, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._offset, self._pid = AT_STEPS.offset(local_rank), os.getpid()
        self._steps = 0
        # the optimizers that have made a step in this round
        self._round: weakref.WeakSet[Any] = weakref.WeakSet()
        self._target: int | None = None
        self._is_known = self._has_signalled = False

    def install(self) -> bool:
        """Watch the steps of all optimizers. Returns False as long as torch is not imported."""
        register = getattr(
            sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None
        )
        if register is None or not hasattr(sys.modules["torch"], "distributed"):
            return False
        register(self.after_step)
        return True

    def after_step(self, optimizer: Any, *_: object) -> None:
        if os.getpid() != self._pid or self._has_signalled or not self._begins_round(optimizer):
            return
        self._steps += 1
        distributed = sys.modules["torch"].distributed
        if self._steps == 1 and distributed.is_available() and distributed.is_initialized():
            AT_STEPS.pack_into(self._map, self._offset, TAKES_SIGNALS)
        number = STEP_SIGNAL.unpack_from(self._map, HEADER.size)[0]
        if number and self._is_common(distributed):
            self._has_signalled = True
            AT_STEPS.pack_into(self._map, self._offset, SIGNALLED)
            threads = threading.enumerate()
            signal.raise_signal(number)
            wait_for_timers(known=threads)

    def _begins_round(self, optimizer: Any) -> bool:
        """Return whether this is the first step of a round: its optimizer is the first, or the
        first to come again.
        """
        if self._round and optimizer not in self._round:
            self._round.add(optimizer)
            return False
        self._round.clear()
        self._round.add(optimizer)
        return True

    def _is_common(self, distributed: Any) -> bool:
        """Return whether this is the step that rank 0 has named, or it is too late to agree."""
        try:
            store = distributed.distributed_c10d._get_default_store()
            if not self._is_known:
                self._is_known = True
                store.add(KNOWN, 1)
            if self._target is None and store.check([STEP]):
                self._target = int(store.get(STEP))
            elif (
                self._target is None
                and distributed.get_rank() == 0
                and self._all_know(store, distributed)
            ):
                self._target = self._steps + 1
                store.set(STEP, str(self._target))
                store.get(STEP)  # it has arrived
        except Exception:  # the group or its store is gone
            return True
        return self._target is not None and self._steps >= self._target

    @staticmethod
    def _all_know(store: Any, distributed: Any) -> bool:
        return bool(store.add(KNOWN, 0) >= distributed.get_world_size())


def wait_for_timers(known: Collection[threading.Thread]) -> None:
    """Wait for timers that were started since these were all threads."""
    for thread in threading.enumerate():
        if (
            isinstance(thread, threading.Timer)
            and thread not in known
            and thread.interval <= LONGEST_TIMER
        ):
            thread.join(2 * LONGEST_TIMER)  # what it calls may in turn wait for this thread
