"""`paceline.spawn`: start ranks as children of this process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from paceline.contract import env
from paceline.contract.heartbeat_file import READY, ScriptEnd
from paceline.contract.process import describe_exit, die_with_parent
from paceline.contract.run_folder import AttemptFolder, write_atomically
from paceline.contract.stacks import write_stacks_on_signal
from paceline.errors import LaunchError
from paceline.runtime.settings import LaunchContext
from paceline.runtime.step_boundary.heartbeat import Heartbeat

KILL_AFTER = 5.0  # seconds from SIGTERM to SIGKILL for the remaining ranks after one has failed


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nproc: int | None = None) -> None:
    """Run `fn(*args)` in `nproc` new processes, one per rank; `fn` opens a `paceline.session`.

    If the ranks have already been started (by torchrun, srun or `paceline run`), call `fn` right
    here. Guard the call with `if __name__ == "__main__":`. If one rank fails, the others are ended.

    Args:
        fn: A function that can be pickled: one at the top level of a module.
        args: Its arguments.
        nproc: The number of ranks; by default what the launch asked for, one per GPU, or 2 without
        GPUs.

    Raises:
        LaunchError: A rank failed. The message names it and its exit code or signal.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        fn(*args)
        return
    launch_spec = LaunchContext.read().launch_spec
    count = nproc or (launch_spec.nproc if launch_spec else _default_nproc())
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    environments = [
        {**master, **rank_environment(local, count, os.environ)} for local in range(count)
    ]
    ranks: dict[SpawnProcess, int] = {}
    try:
        with _forwarding_sigterm(ranks) as forwarded:
            for variables in environments:
                process = context.Process(target=_run_rank, args=(fn, args, variables, os.getpid()))
                process.start()
                ranks[process] = int(variables["RANK"])
            _supervise(ranks, int(environments[0]["WORLD_SIZE"]), forwarded)
    finally:
        _end(ranks)


def rank_environment(local: int, count: int, environ: Any) -> dict[str, str]:
    """Return torchrun's variables for one child. An agent sets the node; without one, there is a
    single node.
    """
    node, nodes = int(environ.get("GROUP_RANK", 0)), int(environ.get("GROUP_WORLD_SIZE", 1))
    master = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    return {
        **master,
        env.SPAWNED: "1",
        "RANK": str(node * count + local),
        "WORLD_SIZE": str(nodes * count),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }


def _default_nproc() -> int:
    """Return one per GPU, or 2, so that the distributed path is exercised."""
    import torch

    return torch.cuda.device_count() or 2


def _run_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], parent: int
) -> None:
    os.environ.update(variables)
    die_with_parent(parent)
    # Ctrl-C reaches all processes of the terminal. Only the parent acts on it, so there is one
    # traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    attempt, rank, local_rank = _attempt(), int(variables["RANK"]), int(variables["LOCAL_RANK"])
    heartbeat_file = LaunchContext.read().heartbeat_file or ""
    script_end = ScriptEnd(heartbeat_file, local_rank)
    if attempt is not None:
        write_stacks_on_signal(
            attempt.stacks(rank), heartbeat_file=heartbeat_file, local_rank=local_rank
        )
        if hasattr(signal, "SIGUSR1"):
            # a stop request may arrive before a session is open
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # tell the agent which process this rank is, and that it can take signals
        heartbeat = Heartbeat(heartbeat_file, local_rank)
        heartbeat.set_state(READY)
        heartbeat.close()
    try:
        fn(*args)
        script_end.is_normal = True
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        _report(attempt, rank, type=type(error).__name__, message=str(error), traceback=text)
        raise


@contextmanager
def _forwarding_sigterm(ranks: Iterable[SpawnProcess]) -> Iterator[threading.Event]:
    """Forward SIGTERM to the ranks, which save and stop, instead of ending this process and them
    with it: a scheduler that preempts a job signals all of its processes.

    Yields whether that has happened.
    """
    forwarded, heartbeat = threading.Event(), Heartbeat(LaunchContext.read().heartbeat_file, 0)

    def forward(number: int, frame: FrameType | None) -> None:
        if heartbeat.is_ending:
            _die()
        forwarded.set()
        for process in ranks:
            process.terminate()

    # otherwise the script has its own handler
    takes_signal = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if takes_signal:
        signal.signal(signal.SIGTERM, forward)
    try:
        yield forwarded
    finally:
        if takes_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        heartbeat.close()


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _supervise(ranks: dict[SpawnProcess, int], world_size: int, forwarded: threading.Event) -> None:
    """Wait for all ranks, or until one has failed."""
    left = dict(ranks)
    while left:
        wait([process.sentinel for process in left])
        ended = [process for process in left if process.exitcode is not None]
        codes = {left.pop(process): process.exitcode or 0 for process in ended}
        failed = {rank: code for rank, code in codes.items() if code}
        if forwarded.is_set() and -signal.SIGTERM in failed.values():
            _end(left)
            _die()  # as its ranks did: they do not handle SIGTERM
        for rank, code in failed.items():
            _report(_attempt(), rank, code=code)
        if failed:
            # A rank that was killed did not fail because of another rank; the others may have.
            rank = min(failed, key=lambda rank: (failed[rank] > 0, rank))
            raise LaunchError(
                f"Rank {rank} of {world_size} failed: {describe_exit(failed[rank])}.",
                hint="See its traceback above.",
            )


def _attempt() -> AttemptFolder | None:
    """Return the folder where the agent looks for errors of its ranks; None without an agent."""
    context = LaunchContext.read()
    if context.launch_spec is None or context.folder is None:
        return None
    return context.folder.attempt(context.attempt)


def _report(attempt: AttemptFolder | None, rank: int, **found: Any) -> None:
    """Write the error of a rank, once: its own report is better than its exit code."""
    if attempt is None or attempt.error(rank).exists():
        return
    unknown = dict.fromkeys(("type", "message", "traceback"), "")
    record = {"rank": rank, "host": socket.gethostname(), "step": 0, "time": time.time()}
    with suppress(OSError):
        write_atomically(attempt.error(rank), json.dumps({**unknown, **record, **found}))


def _end(processes: Iterable[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + KILL_AFTER
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
