"""Real ranks for tests: one server imports torch once and forks each group of ranks from itself."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ("tests.preloaded", "tests.preloaded_wandb")


def _be_a_rank(
    result: Connection,
    variables: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A forked server keeps the environment of its own start: take the test's.
    os.environ.clear()
    os.environ.update(variables)
    import torch

    from paceline.contract import clean_exit

    torch.set_num_threads(1)
    # for data-loader workers; this server has set its own
    multiprocessing.set_start_method("fork", force=True)
    clean_exit.keep_process_groups(torch.distributed)  # as in every rank that Paceline forks
    try:
        assert sys.modules.keys() >= {*PRELOAD}, (
            "the server ignores errors of this import: try it by hand"
        )
        result.send((True, function(*args)))
    except BaseException:
        result.send((False, traceback.format_exc()))
    finally:
        result.close()


class Ranks:
    """`ranks(function, world_size, *args, timeout=90, env=...)` returns one result per rank, in rank order."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD])
        # Now, while no test is running: the guard attributes later processes to tests.
        forkserver.ensure_running()

    def __call__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 90,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        # Bound but not listening, it stays ours until the ranks are done: their store may listen on it all the same.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        processes, pipes = [], []
        for rank in range(world_size):
            mine, theirs = self.context.Pipe(duplex=False)
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            process = self.context.Process(
                target=_be_a_rank, args=(theirs, variables, function, args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        try:
            return self._gather(pipes, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
            reserved.close()

    def _gather(self, pipes: list[Connection], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        open_pipes = dict(enumerate(pipes))
        deadline = time.monotonic() + timeout
        while open_pipes:
            ready = wait(list(open_pipes.values()), deadline - time.monotonic())
            assert ready, f"ranks {sorted(open_pipes)} sent nothing for {timeout} s"
            for rank, pipe in list(open_pipes.items()):
                if pipe not in ready:
                    continue
                try:
                    fine, value = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a result") from None
                assert fine, f"rank {rank} failed:\n{value}"
                results[rank] = value
                del open_pipes[rank]
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """Stop the server now, so that it ends before the session does."""
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
