"""Ranks forked from a zygote: torch is imported once per node, and not again for a restart."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.agent.workers import fork_safety, process_tree
from paceline.agent.workers.rank_variables import (
    REMOVED,
    common_variables,
    rank_variables,
    thread_variables,
)
from paceline.agent.workers.zygote.start import (
    THREADS,
    ConnectionClosed,
    MessageSocket,
    ZygoteOptions,
    cannot_start,
    start_zygote,
    thread_count,
)
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.agent.workers.output import OutputCapture
    from paceline.agent.workers.started_ranks import Exit, Launch

KILL_TIMEOUT = 10.0  # seconds for a zygote to kill what its ranks left behind


class UnsafeToFork(Exception):
    """These ranks must not be forked; the text says why."""


class ForkedRanks:
    """The agent's side of a zygote and the ranks that it forks."""

    def __init__(self, zygote: MessageSocket, pid: int) -> None:
        self._zygote, self._pid = zygote, pid
        self._ready = False
        self._gone = False
        self._running: dict[int, int] = {}  # local rank -> pid, 0 until the zygote has sent it

    @classmethod
    def prepare(cls, launch_spec: LaunchSpec, environ: Mapping[str, str]) -> ForkedRanks:
        """Adopt the zygote that the command has started before this agent, else start one. Does not
        wait for it.
        """
        if env.ZYGOTE in environ:
            descriptor, pid = map(int, environ[env.ZYGOTE].split("/"))
            os.set_inheritable(descriptor, False)
            return cls(MessageSocket(socket.socket(fileno=descriptor)), pid)
        variables = {name: value for name, value in environ.items() if name not in REMOVED}
        variables.update(launch_spec.variables)
        options = ZygoteOptions.of(launch_spec, environ)
        try:
            ours, pid = start_zygote(launch_spec.python, options, variables)
        except OSError as error:
            raise cannot_start(launch_spec.python, error) from error
        return cls(MessageSocket(ours), pid)

    def wait_until_ready(
        self, is_interrupted: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        """Wait until torch is imported. Raises `UnsafeToFork` if the ranks must start in another
        way.

        `say` is called with notes for the user.
        """
        while not self._ready:
            if is_interrupted():
                raise LaunchError("Interrupted before the ranks started.")
            try:
                messages = self._zygote.receive_pending()
                if not messages:
                    select.select([self._zygote], [], [], 0.2)
            except ConnectionClosed:
                raise LaunchError(
                    "The zygote (the process that imports torch) ended before it was ready.",
                    hint="The node may be out of memory: see `dmesg`, or ask for more memory.",
                ) from None
            for message, _ in messages:
                if message["kind"] == "unsafe":
                    raise UnsafeToFork(message["why"])
                if message["kind"] == "warm":
                    say(_describe_warm(message["seconds"]))
                if message["kind"] == "preload_failed":
                    raise LaunchError(
                        f"Cannot preload {message['module']}.\n{message['why'].rstrip()}",
                        hint="Install the module, or remove it from --preload.",
                    )
                if message["kind"] == "ready":
                    self._ready = True

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        assert self._ready
        assert not self._running
        descriptors: list[int] = []
        variables = {}
        for rank, local_rank in launch.ranks():
            descriptors += output.open(rank)
            variables[str(local_rank)] = rank_variables(launch, rank, local_rank)
            self._running[local_rank] = 0
        message = {"kind": "start", "environ": common_variables(launch), "ranks": variables}
        try:
            self._zygote.send(message, descriptors)
        except ConnectionClosed:
            self._gone = True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return list(self._running)

    @property
    def gone(self) -> bool:
        """Whether the zygote has ended and can start nothing more."""
        return self._gone

    def fileno(self) -> int | None:
        return None if self._gone else self._zygote.fileno()

    def poll(self) -> list[Exit]:
        from paceline.agent.workers.started_ranks import Exit

        exits = []
        try:
            for message, _ in [] if self._gone else self._zygote.receive_pending():
                if message["kind"] == "started":
                    pids = {int(local_rank): pid for local_rank, pid in message["pids"].items()}
                    self._running = {
                        local_rank: pids.get(local_rank, 0) for local_rank in self._running
                    }
                elif message["kind"] == "exit" and message["local_rank"] in self._running:
                    del self._running[message["local_rank"]]
                    exits.append(Exit(message["local_rank"], message["code"], message["time"]))
                elif message["kind"] == "fork_failed":
                    raise LaunchError(f"Cannot start all ranks: fork failed: {message['why']}.")
        except ConnectionClosed:
            self._gone = True
        if self._gone and self._running:
            # Somebody killed the zygote, and the kernel killed its ranks with it.
            exits += [
                Exit(local_rank, -signal.SIGKILL, time.time()) for local_rank in self._running
            ]
            self._running.clear()
        return exits

    def pids(self) -> dict[int, int]:
        return {local_rank: pid for local_rank, pid in self._running.items() if pid}

    def has_failed_rank(self) -> bool:
        return False

    def kill_leftovers(self) -> None:
        """Have the zygote kill the processes of its ranks, which it has adopted."""
        if self._gone:
            return
        try:
            self._zygote.send({"kind": "kill_leftovers"})
            deadline = time.monotonic() + KILL_TIMEOUT
            while time.monotonic() < deadline:
                message, _ = self._zygote.receive(max(0.01, deadline - time.monotonic()))
                if message["kind"] == "killed_leftovers":
                    return
        except (ConnectionClosed, TimeoutError):
            self._gone = True

    def close(self) -> None:
        """Close the socket, which ends the zygote and everything below it."""
        self._zygote.close()
        if not self._ready:
            # it may still be importing, and has no ranks yet
            process_tree.send_signal(self._pid, signal.SIGKILL)
        process_tree.await_end(self._pid, KILL_TIMEOUT)


def _describe_warm(seconds: int) -> str:
    time = f"{seconds} s" if seconds % 60 else f"{seconds // 60}m"
    return f"torch stays imported for your next runs, for {time}; see `paceline clean --processes`"


def reason_not_to_fork(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> str | None:
    """Return why these ranks cannot be forked, as far as the job and the script's text show; None
    if they can.
    """
    if sys.platform != "linux":
        return f"ranks are not forked on {sys.platform}"
    for name, text in thread_variables(thread_count(launch_spec, environ)).items():
        if name != THREADS and launch_spec.variables.get(name, text) != text:
            return f"the zygote has {name}={text}, not the value that you set"
    set_first = fork_safety.variable_set_before_torch(fork_safety.read_program(launch_spec))
    if set_first is not None:
        return f"the script sets {set_first} before it imports torch"
    return None
