"""Data-loader workers that outlive no rank and answer no signal meant for one.

A stop signal may reach a whole process group. A worker that died of it would take its rank down just
before the save, so workers ignore it; and so that none is left behind, each dies with its parent.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data._utils import signal_handling

from paceline.contract.process import die_with_parent

PATIENCE = 3.0  # seconds that workers have to end by themselves, all together
_IGNORED = ("SIGTERM", "SIGUSR1", "SIGINT")


@dataclass(frozen=True)
class WorkerInit:
    """What a worker does before its first item; then what the user asked for."""

    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        end_with_rank()
        torch.set_num_threads(1)
        if self.then is not None:
            self.then(worker)


def end_with_rank() -> None:
    """End this worker when its rank ends, and now if the rank has already ended."""
    parent = multiprocessing.parent_process()
    # With a fork server, the parent by descent is the server from the start.
    by_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    die_with_parent(None if parent is None or by_server else parent.pid)


class Crew:
    """The workers of one data loader. They end when it is told to, is collected, or the interpreter exits."""

    def __init__(self, owner: object) -> None:
        self.iterator: Any = None
        # Ahead of the wait for children that multiprocessing does at exit: workers ignore the SIGTERM it sends.
        Finalize(owner, self.dismiss, exitpriority=10)

    def engage(self, iterator: Any) -> None:
        """A new epoch's iterator; the old one's workers go, unless they are the same."""
        if self.iterator is not iterator:
            self.dismiss()
        self.iterator = iterator

    def dismiss(self) -> None:
        """End the workers now: asked first, then killed."""
        iterator, self.iterator = self.iterator, None
        workers: list[BaseProcess] = getattr(iterator, "_workers", [])
        if not any(worker.is_alive() for worker in workers):
            return
        # torch would wait for one after the other, five seconds each, and at exit not tell them at all.
        iterator._workers_done_event.set()
        for queue in iterator._index_queues:
            queue.put(None)
        _wait_for_all(workers)
        alive = [worker for worker in workers if worker.is_alive()]
        if alive and getattr(iterator, "_worker_pids_set", False):
            # Otherwise torch takes the death of a worker for a failure, and raises wherever we are.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        for worker in alive:
            worker.kill()
            worker.join()
        iterator._shutdown_workers()


def _wait_for_all(workers: list[BaseProcess]) -> None:
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
