"""Data-loader workers that ignore stop signals and never outlive their rank.

A stop signal may reach the whole process group. A worker that died from it would take its rank down
just before the save, so workers ignore it. Each worker dies with its parent, so that none is left
behind.
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

SHUTDOWN_TIMEOUT = 3.0  # seconds for all workers together to exit on their own
# and before their first batch: spawned ones import torch for seconds before they listen
UNUSED_TIMEOUT = 0.3
_IGNORED_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


@dataclass(frozen=True)
class WorkerInit:
    """Prepares a worker before its first item, then calls the user's `worker_init_fn`."""

    user_init: Callable[[int], Any] | None = None
    start_method: str | None = None  # None: the default one

    def __call__(self, worker: int) -> None:
        for name in _IGNORED_SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        end_with_rank(self.start_method)
        torch.set_num_threads(1)
        if self.user_init is not None:
            self.user_init(worker)


def make_worker_init(user_init: Callable[[int], Any] | None, context: Any) -> WorkerInit:
    """Return the `worker_init_fn` for a DataLoader with this `multiprocessing_context`."""
    return WorkerInit(
        user_init,
        context if context is None or isinstance(context, str) else context.get_start_method(),
    )


def end_with_rank(start_method: str | None = None) -> None:
    """End this worker when its rank ends, and now if the rank has already ended."""
    parent = multiprocessing.parent_process()
    # With a fork server, the parent by descent is the server from the start.
    by_server = (start_method or multiprocessing.get_start_method(allow_none=True)) == "forkserver"
    die_with_parent(None if parent is None or by_server else parent.pid)


class WorkerPool:
    """The workers of one DataLoader. They stop on `shutdown`, when `owner` is collected, or at
    exit.
    """

    def __init__(self, owner: object) -> None:
        self.iterator: Any = None
        # Before multiprocessing waits for its children at exit: workers ignore the SIGTERM it
        # sends.
        Finalize(owner, self.shutdown, exitpriority=10)

    def attach(self, iterator: Any) -> None:
        """Take a new epoch's iterator, and stop the old one's workers unless it is the same
        iterator.
        """
        if self.iterator is not iterator:
            self.shutdown()
        self.iterator = iterator

    def shutdown(self) -> None:
        """Stop the workers now: ask them first, then kill those that remain."""
        iterator, self.iterator = self.iterator, None
        workers: list[BaseProcess] = getattr(iterator, "_workers", [])
        if not any(worker.is_alive() for worker in workers):
            return
        # torch would wait five seconds for each worker in turn, and at exit not ask them at all.
        iterator._workers_done_event.set()
        for queue in iterator._index_queues:
            queue.put(None)
        _wait_for_all(
            workers, SHUTDOWN_TIMEOUT if getattr(iterator, "_rcvd_idx", 1) else UNUSED_TIMEOUT
        )
        alive = [worker for worker in workers if worker.is_alive()]
        if alive and getattr(iterator, "_worker_pids_set", False):
            # Otherwise torch treats the death of a worker as a failure and raises wherever we are.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        for worker in alive:
            worker.kill()
            worker.join()
        iterator._shutdown_workers()


def _wait_for_all(workers: list[BaseProcess], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
