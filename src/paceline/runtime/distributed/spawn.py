"""`paceline.spawn`: ranks as children of this process, where nothing else has started any."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.contract import env
from paceline.contract.process import die_with_parent
from paceline.contract.rank_env import SPAWNED
from paceline.contract.run_folder import AttemptFolder, write_atomically
from paceline.errors import LaunchError, UsageError
from paceline.runtime.boundary.heartbeat import Heartbeat
from paceline.runtime.launch_context import LaunchContext

SAME_TERM = 1.0  # seconds: one request may arrive twice, from the scheduler and passed on by a command
KILL_AFTER = 5.0  # seconds from SIGTERM to SIGKILL for the ranks that are left when one has failed


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nproc: int | None = None) -> None:
    """Run `fn(*args)` on `nproc` new processes, each of which finds its place by `paceline.session`.

    Under a agent that has started the ranks already (torchrun, srun, `paceline run`), `fn` is called right
    here. Guard the call with `if __name__ == "__main__":`. The first rank to fail ends the others, and is named.
    """
    if env.RANK in os.environ and env.WORLD_SIZE in os.environ:
        fn(*args)
        return
    count = nproc or _asked_for()
    if count < 1:
        raise UsageError(f"nproc={nproc}: nothing to spawn", hint="At least 1; leave it out for one per GPU.")
    context = multiprocessing.get_context("spawn")
    environments = [rank_variables(local, count, os.environ) for local in range(count)]
    port = _free_port()
    processes: list[SpawnProcess] = []
    with _PassingTermOn(processes) as term:
        for variables in environments:
            variables.setdefault(env.MASTER_ADDR, "127.0.0.1")
            variables.setdefault(env.MASTER_PORT, str(port))
            process = context.Process(target=_be_a_rank, args=(fn, args, variables, os.getpid()))
            process.start()
            processes.append(process)
        world_size = int(environments[0][env.WORLD_SIZE])
        _supervise(processes, [int(variables[env.RANK]) for variables in environments], world_size, term)


def rank_variables(local: int, count: int, environ: Any) -> dict[str, str]:
    """torchrun's variables of one child; the node's place is told by a agent, or there is one node."""
    node, nodes = int(environ.get(env.GROUP_RANK, 0)), int(environ.get(env.GROUP_WORLD_SIZE, 1))
    place = {name: environ[name] for name in (env.MASTER_ADDR, env.MASTER_PORT) if name in environ}
    if nodes > 1 and len(place) < 2:
        raise UsageError(
            f"{nodes} nodes, but MASTER_ADDR and MASTER_PORT are not set",
            hint="Start it by paceline submit or run.",
        )
    return {
        **place, SPAWNED: "1",
        env.RANK: str(node * count + local), env.WORLD_SIZE: str(nodes * count),
        env.LOCAL_RANK: str(local), env.LOCAL_WORLD_SIZE: str(count),
        env.GROUP_RANK: str(node), env.GROUP_WORLD_SIZE: str(nodes),
    }  # fmt: skip


def _asked_for() -> int:
    """As many as the order says; else one per GPU; else two, so that the distributed path is the one tried."""
    launch_spec = LaunchContext.read().launch_spec
    if launch_spec is not None:
        return launch_spec.nproc
    import torch

    return torch.cuda.device_count() or 2


def _be_a_rank(fn: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], parent: int) -> None:
    os.environ.update(variables)
    die_with_parent(parent)
    # Ctrl-C reaches the whole terminal group; the parent decides, so that there is one traceback and not many.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    attempt, rank = _attempt(), int(variables[env.RANK])
    if attempt is not None:
        _answer_with_stacks(attempt.stacks(rank))
    try:
        fn(*args)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        _report(attempt, rank, type=type(error).__name__, message=str(error), traceback=text)
        raise


class _PassingTermOn:
    """A SIGTERM to this process is for its ranks: they save and stop. To die of it would be to take them along.

    A scheduler that preempts a job signals all of its processes. A second one, more than a second later, ends at once.
    """

    def __init__(self, processes: list[SpawnProcess]) -> None:
        self._processes = processes
        self._heartbeat = Heartbeat(LaunchContext.read().heartbeat_file, 0)
        self.since: float | None = None
        self._listens = False

    def __enter__(self) -> _PassingTermOn:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else the script knows better
            self._listens = True
            signal.signal(signal.SIGTERM, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._heartbeat.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heartbeat.is_ending or (self.since is not None and now - self.since > SAME_TERM):
            self.die()
        self.since = now if self.since is None else self.since
        for process in self._processes:
            process.terminate()

    @staticmethod
    def die() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _supervise(
    processes: list[SpawnProcess], ranks: list[int], world_size: int, term: _PassingTermOn
) -> None:
    """Wait for all. On the first failure, or any way out of here, the rest is ended."""
    left = dict(zip(processes, ranks, strict=True))
    try:
        while left:
            wait([process.sentinel for process in left])
            ended = {process: left.pop(process) for process in list(left) if process.exitcode is not None}
            failed = {rank: code for process, rank in ended.items() if (code := process.exitcode)}
            if term.since is not None and -signal.SIGTERM in failed.values():
                _end(list(left))
                term.die()  # as its ranks did: nobody there listened
            for rank, code in failed.items():
                _report(_attempt(), rank, code=code)
            if failed:
                # One that was killed cannot have died of another's error; the others may have.
                rank = min(failed, key=lambda each: (failed[each] > 0, each))
                raise LaunchError(
                    f"rank {rank} of {world_size} failed: {_in_words(failed[rank])}",
                    hint="Its traceback stands above.",
                )
    finally:
        _end(list(left))


def _attempt() -> AttemptFolder | None:
    """Where a agent looks for what became of its ranks."""
    context = LaunchContext.read()
    return (
        context.folder.attempt(context.attempt)
        if context.launch_spec is not None and context.folder is not None
        else None
    )


def _report(attempt: AttemptFolder | None, rank: int, **found: Any) -> None:
    """Leave word of a failure, once: the rank's own word counts more than how its process ended."""
    if attempt is None or attempt.error(rank).exists():
        return
    told = {"rank": rank, "host": socket.gethostname(), "type": "", "message": "", "traceback": "", "step": 0}
    with suppress(OSError):
        write_atomically(attempt.error(rank), json.dumps({**told, "time": time.time(), **found}))


def _answer_with_stacks(path: Path) -> None:
    """SIGUSR2, by which a agent asks ranks that hang: the Python stacks of all threads, into a file."""
    if hasattr(signal, "SIGUSR2"):
        with suppress(OSError):
            # Kept open for as long as this process lives.
            faulthandler.register(
                signal.SIGUSR2, file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            )


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + KILL_AFTER
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
