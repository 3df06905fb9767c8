"""The zygote: a single-threaded process that imports torch once and forks ranks from itself, on request.

It is a process of its own because a agent has threads and must stay light. It talks over one socket; when
that closes, whoever was to supervise the ranks is gone, and so they go too.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.agent.workers import fork_safety, processes
from paceline.agent.workers.environment import thread_variables
from paceline.agent.workers.zygote.messages import Closed, Wire
from paceline.agent.workers.zygote.start import Opening
from paceline.contract import process

# A scheduler may signal every process of a step. What a signal means is for the agent to say.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def main(words: list[str]) -> None:
    descriptor, parent = int(words[0]), int(words[1])
    opening = Opening.read(words[2:])
    process.die_with_parent(parent)
    for each in DEAF_TO:
        signal.signal(each, signal.SIG_IGN)
    wire = Wire(socket.socket(fileno=descriptor))
    os.set_inheritable(descriptor, False)
    try:
        wire.send({
            "kind": "hello", "pid": os.getpid(), "python": sys.executable,
            "threads": opening.threads, "preload": opening.preload,
        })  # fmt: skip
        problem = _import_all(opening)
        if problem:
            wire.send(problem)
            return
        wire.send({"kind": "ready"})
    except Closed:
        return
    job = Zygote(wire).serve()
    if job is not None:
        from paceline.agent.workers import bootstrap

        bootstrap.become(job)


def _import_all(opening: Opening) -> dict[str, Any] | None:
    """Import what the ranks share; the reason why they cannot be forked, if there is one."""
    os.environ.update(thread_variables(opening.threads))
    given = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"  # asking whether there is a GPU must not open the driver here
    source = fork_safety.source_of(opening.program, is_module=opening.is_module, import_path=[os.getcwd()])
    modules = ["torch", "torch.distributed", *fork_safety.wanted_modules(source)]
    gc.disable()
    for name in [*modules, *opening.preload]:
        try:
            importlib.import_module(name)
        except BaseException:
            if name in opening.preload:
                return {"kind": "broken", "module": name, "why": traceback.format_exc()}
            # The script will meet the same error, and is the better one to tell it.
        if fork_safety.threads_running() > 1:
            count = fork_safety.threads_running() - 1
            return {"kind": "hazard", "why": f"importing {name} started {count} thread{'s'[: count > 1]}"}
        if fork_safety.device_in_use():
            return {"kind": "hazard", "why": f"importing {name} opened the GPU driver"}
    if given is None:
        del os.environ[NVML_CHECK]
    importlib.import_module("paceline.agent.workers.bootstrap")
    # What is never touched stays shared between the ranks. Not collected before: that takes a twelfth of the import,
    # for little garbage.
    gc.freeze()
    gc.enable()
    return None


class Zygote:
    """Forks, reaps and tells."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.ranks: dict[int, int] = {}  # pid -> local rank
        self.beat = ""

    def serve(self) -> dict[str, Any] | None:
        """Until the socket closes. Returns a job in each forked child, which then unwinds to become a rank."""
        # The agent that took over may not be the parent: from here on, the end of the socket is the sign.
        process.outlive_parent()
        processes.adopt_orphans()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while True:
                select.select([self.wire.fileno(), reader], [], [])
                with suppress(BlockingIOError):
                    os.read(reader, 4096)
                self._reap()
                for message, descriptors in self.wire.waiting():
                    if message["kind"] == "start":
                        job = self._start(message, descriptors)
                        if job is not None:
                            signal.set_wakeup_fd(-1)
                            os.close(reader)
                            os.close(writer)
                            return job
                    elif message["kind"] == "sweep":
                        processes.sweep(os.getpid())
                        self._reap()
                        self.wire.send({"kind": "swept"})
        except Closed:
            self._end_all()
            return None

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        """Fork the ranks of one attempt. Each takes the next two descriptors for its output."""
        self.beat = message["common"]["beat"]
        pids: dict[str, int] = {}
        parent = os.getpid()
        for position, each in enumerate(message["ranks"]):
            try:
                pid = os.fork()
            except OSError as problem:
                self.wire.send({"kind": "broken", "module": "", "why": f"fork: {problem}"})
                break
            if pid == 0:
                process.die_with_parent(parent)
                output = descriptors[2 * position : 2 * position + 2]
                for number, descriptor in enumerate(output, start=1):
                    os.dup2(descriptor, number)
                for descriptor in {*descriptors}:
                    os.close(descriptor)
                self.wire.close()
                return {**message["common"], **each, "variables": {**message["environ"], **each["variables"]}}
            self.ranks[pid] = each["local_rank"]
            pids[str(each["local_rank"])] = pid
        for descriptor in descriptors:
            os.close(descriptor)
        self.wire.send({"kind": "started", "pids": pids})
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            local_rank = self.ranks.pop(pid, None)
            if local_rank is not None:
                code = os.waitstatus_to_exitcode(status)
                self.wire.send({"kind": "exit", "local_rank": local_rank, "code": code, "time": time.time()})

    def _end_all(self) -> None:
        """Nobody supervises any more."""
        processes.sweep(os.getpid())
        if self.beat:
            Path(self.beat).unlink(missing_ok=True)
