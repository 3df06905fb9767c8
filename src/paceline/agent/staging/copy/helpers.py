"""Helpers: processes that place small files. In threads of one process Python does so no faster than alone.

A helper is told about one group at a time on its standard input, and ends when nobody is at the other end: with
the agent, however that ended.
"""

from __future__ import annotations

import marshal
import queue
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from paceline.agent.staging.copy.small_files import IGNORED_SIGNALS, SmallFiles
from paceline.agent.staging.manifest import Group
from paceline.agent.workers.zygote.start import python_command
from paceline.errors import EnvironmentProblem

if TYPE_CHECKING:
    from paceline.agent.staging.copy.small_files import Placed

WORTH_IT = 1000  # small files for each helper; to start one takes about as long as these


class Helper:
    """One helper, seen from the agent."""

    def __init__(self, files: SmallFiles) -> None:
        # What is asked of the agent must not end a helper that does not yet say so itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self.process = subprocess.Popen(
                python_command(sys.executable, "staging.copy.small_files", bare=True), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, pass_fds=() if files.pack is None else (files.pack,),
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._told = False
        self._files = files

    def place(self, group: Group) -> Placed:
        """As `SmallFiles.place` does, errors included."""
        try:
            if not self._told:
                self._send(vars(self._files))
                self._told = True
            self._send((group.offset, group.size, [tuple(each) for each in group.files]))
            assert self.process.stdout is not None
            kind, *answer = marshal.load(self.process.stdout)
        except (OSError, EOFError):
            raise EnvironmentProblem(
                "[data] stage: a process that copies files was ended from outside",
                hint="was the node short of memory? ask for more by mem_per_gpu",
            ) from None
        if kind == "placed":
            sums, problem = answer
            return sums, problem
        raise OSError(*answer) if kind == "system" else EnvironmentProblem(answer[0], hint=answer[1])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it has ended already
        self.process.wait()

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(marshal.dumps(value))
        self.process.stdin.flush()


class HelperPool:
    """Places groups for as many threads as there are helpers; by itself where there is little to do."""

    def __init__(self, files: SmallFiles) -> None:
        self.files = files
        self._free: queue.LifoQueue[Helper] = queue.LifoQueue()
        self._all: list[Helper] = []

    def call(self, *, count: int, workers: int) -> None:
        """Have helpers come, for so many files."""
        helpers = min(workers, count // WORTH_IT)
        try:
            for _ in range(helpers if helpers > 1 else 0):
                self._all.append(Helper(self.files))
                self._free.put(self._all[-1])
        except OSError:
            pass  # no more processes: those that there are must do

    def place(self, group: Group) -> Placed:
        if not self._all:
            return self.files.place(group.files, offset=group.offset, size=group.size)
        helper = self._free.get()
        try:
            return helper.place(group)
        finally:
            self._free.put(helper)

    def close(self) -> None:
        for each in self._all:
            each.close()
