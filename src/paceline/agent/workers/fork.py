"""Ranks that are forked from a zygote: one import of torch per node, and none at all for a relaunch."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent.workers import fork_safety, processes
from paceline.agent.workers.environment import REMOVED, threads_of
from paceline.agent.workers.zygote.messages import Closed, Wire
from paceline.agent.workers.zygote.start import Opening, open_zygote
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.agent.workers.output import Streams
    from paceline.agent.workers.starter import Exit, Launch

HELLO = 20.0  # seconds within which a zygote must have said who it is: it does so before it imports torch


class Unsafe(Exception):
    """These ranks must not be forked; the text says why."""


class Interrupted(Exception):
    """Told to end while the zygote was still importing."""


class ForkedRanks:
    """The agent's side of a zygote."""

    def __init__(self, wire: Wire, pid: int) -> None:
        self._wire = wire
        self._pid = pid
        self._ready = False
        self._gone = False
        self._running: dict[int, int] = {}  # local rank -> pid; 0 until it is told

    @classmethod
    def begin(cls, launch_spec: LaunchSpec, environ: Mapping[str, str]) -> ForkedRanks:
        """Take over the zygote that was started ahead, if it is the right one, else start one. Returns at once."""
        found = cls._adopt(launch_spec, environ)
        if found is not None:
            return found
        variables = {name: value for name, value in environ.items() if name not in REMOVED}
        variables.update(launch_spec.variables)
        opening = Opening(
            launch_spec.program,
            is_module=launch_spec.is_module,
            threads=threads_of(launch_spec, environ),
            preload=launch_spec.preload,
        )
        try:
            ours, pid = open_zygote(launch_spec.python, opening, variables)
        except OSError as problem:
            raise LaunchError(
                f"cannot start {launch_spec.python}: {problem.strerror}",
                hint="the interpreter must exist on every node: check [environment] in paceline.toml",
            ) from problem
        return cls(Wire(ours), pid)

    @classmethod
    def _adopt(cls, launch_spec: LaunchSpec, environ: Mapping[str, str]) -> ForkedRanks | None:
        found = _ahead(environ)
        if found is None:
            return None
        wire, hello = found
        same = (hello["python"], hello["threads"], hello["preload"]) == (
            launch_spec.python,
            threads_of(launch_spec, environ),
            launch_spec.preload,
        )
        asked = any(fork_safety.read_at_import(name) for name in launch_spec.variables)
        if same and not asked and _read_the_same(hello["pid"], environ):
            return cls(wire, hello["pid"])
        _send_away(wire, hello)
        return None

    def wait_until_ready(self, interrupted: Callable[[], bool]) -> None:
        """Until torch has been imported. Raises `Unsafe` where ranks must be started in another way."""
        while not self._ready:
            if interrupted():
                raise Interrupted
            try:
                messages = self._wire.waiting()
                if not messages:
                    select.select([self._wire], [], [], 0.2)
            except Closed:
                raise LaunchError(
                    "the process that imports torch ended before it was done",
                    hint="memory may have run out on this node: see `dmesg`, or ask for more",
                ) from None
            for message, _ in messages:
                if message["kind"] == "hazard":
                    raise Unsafe(message["why"])
                if message["kind"] == "broken":
                    raise LaunchError(
                        f"cannot preload {message['module']}\n{message['why'].rstrip()}",
                        hint="leave it out of --preload, or install it",
                    )
                self._ready |= message["kind"] == "ready"

    def start(self, launch: Launch, streams: Streams) -> list[int]:
        from paceline.agent.workers.bootstrap import job_of

        assert self._ready
        assert not self._running
        descriptors: list[int] = []
        common = launch.common()
        ranks = []
        for rank, local_rank in launch.ranks():
            descriptors += streams.open(rank)
            ranks.append({"rank": rank, "local_rank": local_rank, "variables": launch.own(rank, local_rank)})
            self._running[local_rank] = 0
        job = job_of(launch.launch_spec, attempt=launch.attempt, beat=launch.beat)
        try:
            self._wire.send({"kind": "start", "common": job, "environ": common, "ranks": ranks}, descriptors)
        except Closed:
            self._gone = True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return list(self._running)

    @property
    def gone(self) -> bool:
        """Whether the zygote can start nothing more."""
        return self._gone

    def fileno(self) -> int | None:
        return None if self._gone else self._wire.fileno()

    def poll(self) -> list[Exit]:
        from paceline.agent.workers.starter import Exit

        found = []
        try:
            for message, _ in [] if self._gone else self._wire.waiting():
                if message["kind"] == "started":
                    told = {int(local_rank): pid for local_rank, pid in message["pids"].items()}
                    self._running = {each: told.get(each, 0) for each in self._running}
                elif message["kind"] == "exit" and message["local_rank"] in self._running:
                    del self._running[message["local_rank"]]
                    found.append(Exit(message["local_rank"], message["code"], message["time"]))
                elif message["kind"] == "broken":
                    raise LaunchError(f"cannot start all ranks: {message['why']}")
        except Closed:
            self._gone = True
        if self._gone and self._running:
            # Somebody killed the zygote, and the kernel its ranks with it.
            found += [Exit(local_rank, -signal.SIGKILL, time.time()) for local_rank in self._running]
            self._running.clear()
        return found

    def pids(self) -> dict[int, int]:
        return {local_rank: pid for local_rank, pid in self._running.items() if pid}

    def in_trouble(self) -> bool:
        return False

    def sweep(self) -> None:
        """The zygote has adopted what the ranks left, and ends it."""
        if self._gone:
            return
        try:
            self._wire.send({"kind": "sweep"})
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                message, _ = self._wire.receive(max(0.01, deadline - time.monotonic()))
                if message["kind"] == "swept":
                    return
        except (Closed, TimeoutError):
            self._gone = True

    def close(self) -> None:
        """The zygote ends, with all that is left below it, when its socket closes."""
        self._wire.close()
        if not self._ready:
            processes.send(self._pid, signal.SIGKILL)  # it may still be importing, and has no ranks yet
        with suppress(ChildProcessError):  # with a head start it is the command's child, not ours
            os.waitpid(self._pid, 0)


def _ahead(environ: Mapping[str, str]) -> tuple[Wire, dict[str, Any]] | None:
    """The zygote that was started ahead of this agent, and who it says it is."""
    number = environ.get(env.ZYGOTE, "")
    if not number.isdigit():
        return None
    try:
        wire = Wire(socket.socket(fileno=int(number)))
        wire.end.set_inheritable(False)
        hello, _ = wire.receive(HELLO)
    except (OSError, Closed):
        return None
    return wire, hello


def _read_the_same(pid: int, environ: Mapping[str, str]) -> bool:
    """Whether the zygote imports torch with the variables that this agent has: a `.env` may have added some."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    found = dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if b"=" in entry)
    return _at_import(found) == _at_import(environ)


def _at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if fork_safety.read_at_import(name)}


def _send_away(wire: Wire, hello: dict[str, Any]) -> None:
    processes.send(hello["pid"], signal.SIGKILL)  # it would go on importing for a second or two
    wire.close()


def dismiss(environ: Mapping[str, str]) -> None:
    """A zygote that was started ahead is not needed."""
    found = _ahead(environ)
    if found is not None:
        _send_away(*found)


def can_fork(launch_spec: LaunchSpec) -> str | None:
    """Why these ranks cannot be forked, judged before anything is started; None when they can."""
    if sys.platform != "linux":
        return f"ranks are not forked on {sys.platform}"
    source = fork_safety.source_of(
        launch_spec.program, is_module=launch_spec.is_module, import_path=launch_spec.import_path
    )
    name = fork_safety.set_before_torch(source)
    if name is not None:
        return f"the script sets {name} before it imports torch"
    return None
