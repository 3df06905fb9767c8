"""The zygote: a single-threaded process that imports torch once and forks ranks on request.

It is a process of its own because the agent has threads and must stay light. It talks to the agent
over one socket. When that closes, nobody supervises the ranks any more, so the zygote kills them
and exits.
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
from typing import Any

from paceline.agent.workers import bootstrap, fork_safety, process_tree
from paceline.agent.workers.rank_variables import thread_variables
from paceline.agent.workers.warm import read_conditions, stay_warm
from paceline.agent.workers.zygote.start import ConnectionClosed, MessageSocket, ZygoteOptions
from paceline.contract import clean_exit, frameworks, process

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# A scheduler may signal every process of a step, but only the agent decides what a signal means.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(args: list[str]) -> None:
    descriptor, parent = int(args[0]), int(args[1])
    options = ZygoteOptions.from_args(args[2:])
    process.die_with_parent(parent)
    conditions = read_conditions(sys.executable, os.environ) if options.warm else {}
    clean_exit.wait_for_torch_at_exit()  # in the ranks: they inherit it
    agent = MessageSocket(socket.socket(fileno=descriptor))
    os.set_inheritable(descriptor, False)
    variables = None
    try:
        problem = _import_for(options)
        if options.warm and problem is None:
            later = stay_warm(agent, options, conditions)
            if later is not None:
                # This is another process now, which a later run has asked for.
                agent, options = later
                problem = _import_for(options)
        problem = problem or _import_modules(options.preload, options, required=True)
        agent.send(problem or {"kind": "ready"})
        variables = None if problem else Zygote(agent).serve()
    except ConnectionClosed:  # the agent is gone, or needs another zygote
        process_tree.kill_descendants(os.getpid())
    if variables is None:
        os._exit(0)  # a third of a second sooner than Python, which would first free all of torch
    bootstrap.run_forked_rank(variables)


def _import_for(options: ZygoteOptions) -> dict[str, Any] | None:
    """Import torch, and what the script needs of torch and of Paceline: nothing of the user's
    own.
    """
    for each in IGNORED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    folder = os.getcwd()
    program = options.program if options.is_module else os.path.join(folder, options.program)
    _, source = frameworks.read_program(program, is_module=options.is_module, import_path=[folder])
    names = ["torch", "torch.distributed", *fork_safety.modules_to_preload(source)]
    return _import_modules(names, options)


def _import_modules(
    names: list[str], options: ZygoteOptions, *, required: bool = False
) -> dict[str, Any] | None:
    """Import modules. Returns a message for the agent if ranks cannot be forked, or if a required
    one is missing.
    """
    os.environ.update(thread_variables(options.threads))
    os.environ[NVML_CHECK] = "1"  # a check for GPUs must not open the driver in this process
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:
            if required:
                return {"kind": "preload_failed", "module": name, "why": traceback.format_exc()}
            # The script will raise the same error, with a better traceback.
        threads = fork_safety.count_threads() - 1
        if threads:
            return {
                "kind": "unsafe",
                "why": f"importing {name} started {threads} thread{'s'[: threads > 1]}",
            }
        if fork_safety.is_device_in_use():
            return {"kind": "unsafe", "why": f"importing {name} opened the GPU driver"}
    # Ranks share the pages that nobody writes to. No collection before the freeze: it takes a
    # twelfth of the import time and frees little.
    gc.freeze()
    gc.enable()
    return None


class Zygote:
    """Forks ranks, reaps them and reports their ends."""

    def __init__(self, agent: MessageSocket) -> None:
        self.agent = agent
        self.ranks: dict[int, int] = {}  # pid -> local rank

    def serve(self) -> dict[str, str]:
        """Serve until the socket closes, which raises `ConnectionClosed`. In each forked child this
        returns the variables of its rank.
        """
        # The agent that adopted us may not be our parent: from here on we end with the socket
        # instead.
        process.outlive_parent()
        process_tree.adopt_orphans()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            select.select([self.agent.fileno(), reader], [], [])
            with suppress(BlockingIOError):
                os.read(reader, 4096)
            self._reap()
            for message, descriptors in self.agent.receive_pending():
                if message["kind"] == "start":
                    variables = self._fork_ranks(message, descriptors)
                    if variables is not None:
                        signal.set_wakeup_fd(-1)
                        os.close(reader)
                        os.close(writer)
                        return variables
                elif message["kind"] == "kill_leftovers":
                    process_tree.kill_descendants(os.getpid())
                    self._reap()
                    self.agent.send({"kind": "killed_leftovers"})

    def _fork_ranks(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, str] | None:
        """Fork the ranks of one attempt. Each takes the next two descriptors for its output."""
        parent = os.getpid()
        pids: dict[str, int] = {}
        for position, (local_rank, variables) in enumerate(message["ranks"].items()):
            try:
                pid = os.fork()
            except OSError as error:
                self.agent.send({"kind": "fork_failed", "why": str(error)})
                break
            if pid == 0:
                process.die_with_parent(parent)
                output = descriptors[2 * position : 2 * position + 2]
                for number, descriptor in enumerate(output, start=1):
                    os.dup2(descriptor, number)
                for descriptor in descriptors:
                    os.close(descriptor)
                self.agent.close()
                return {**message["environ"], **variables}
            self.ranks[pid] = int(local_rank)
            pids[local_rank] = pid
        for descriptor in descriptors:
            os.close(descriptor)
        self.agent.send({"kind": "started", "pids": pids})
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
                self.agent.send(
                    {"kind": "exit", "local_rank": local_rank, "code": code, "time": time.time()}
                )
