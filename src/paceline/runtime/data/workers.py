"""The DataLoader of a loader, whose workers ignore stop signals and never outlive their rank.

A stop signal may reach the whole process group. A worker that died from it would take its rank down
just before the save, so workers ignore it. Each worker dies with its parent, so that none is left
behind.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from paceline.contract.process import die_with_parent

SHUTDOWN_TIMEOUT = 3.0  # seconds for all workers together to exit on their own
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class LoaderOptions:
    """How items are loaded: what torch's DataLoader gets."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0


@dataclass(frozen=True)
class _WorkerInit:
    """Prepares a worker before its first item, then calls the user's `worker_init_fn`."""

    user_init: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        for number in _IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(None)  # torch ends a worker whose rank has ended before this
        if self.user_init is not None:
            self.user_init(worker)


class WorkerLoader:
    """A DataLoader whose workers stop on `shutdown`, when `owner` is collected, or at exit."""

    def __init__(
        self,
        owner: object,
        dataset: Any,
        options: LoaderOptions,
        *,
        collate_fn: Callable[[Any], Any] | None,
        batch_sampler: Any = None,
        pin_memory: bool = False,
    ) -> None:
        # A separate generator: otherwise the start of each epoch would draw from the one that the
        # model uses.
        self.generator = torch.Generator()
        batching: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            batching = {"batch_size": None}
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=options.num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory if options.pin_memory is None else options.pin_memory,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
            worker_init_fn=_WorkerInit(options.worker_init_fn) if options.num_workers else None,
            multiprocessing_context=options.multiprocessing_context,
            generator=self.generator,
            timeout=options.timeout,
            **batching,
        )
        self._iterator: Any = None
        # Before multiprocessing waits for its children at exit: workers ignore the SIGTERM it
        # sends.
        Finalize(owner, self.shutdown, exitpriority=10)

    def begin_pass(self) -> Iterator[Any]:
        """Return the iterator of a new pass. An earlier one ends, unless its workers persist."""
        if not self.loader.persistent_workers:
            self.shutdown()
        self._iterator = iter(self.loader)
        return self._iterator  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Stop the workers now: ask them first, then kill those that remain."""
        iterator, self._iterator = self._iterator, None
        self.loader._iterator = None
        workers: list[BaseProcess] = getattr(iterator, "_workers", [])
        if not any(worker.is_alive() for worker in workers):
            return
        # torch would wait five seconds for each worker in turn, and at exit not ask them at all.
        iterator._workers_done_event.set()
        for queue in iterator._index_queues:
            queue.put(None)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        alive = [worker for worker in workers if worker.is_alive()]
        if alive and getattr(iterator, "_worker_pids_set", False):
            # Otherwise torch treats the death of a worker as a failure and raises wherever we are.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        for worker in alive:
            worker.kill()
            worker.join()
        iterator._shutdown_workers()
