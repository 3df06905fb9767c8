"""Helper processes that copy small files: Python threads in one process do it no faster than one
thread.

A helper gets one group at a time on its stdin. It ends when that closes, so it never outlives the
agent.
"""

from __future__ import annotations

import marshal
import queue
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from paceline.contract.processes.python_command import python_command
from paceline.errors import EnvironmentProblem
from paceline.staging.copy.small_files import IGNORED_SIGNALS, SmallFileCopier
from paceline.staging.manifest import FileGroup

if TYPE_CHECKING:
    from paceline.staging.copy.small_files import CopyResult

FILES_PER_HELPER = 1000  # starting a helper takes about as long as copying this many files


class Helper:
    """The agent's side of one helper process."""

    def __init__(self, copier: SmallFileCopier) -> None:
        # A stop request must not end a helper that does not ignore signals yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self.process = subprocess.Popen(
                python_command(sys.executable, "staging.copy.small_files", bare=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=() if copier.pack is None else (copier.pack,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_configured = False
        self._copier = copier

    def copy(self, group: FileGroup) -> CopyResult:
        """Do what `SmallFileCopier.copy` does, errors included."""
        try:
            if not self._is_configured:
                self._send(vars(self._copier))
                self._is_configured = True
            self._send((group.offset, group.size, [tuple(each) for each in group.files]))
            assert self.process.stdout is not None
            kind, *values = marshal.load(self.process.stdout)
        except (OSError, EOFError):
            raise EnvironmentProblem(
                "[data] stage: A process that copies files was killed.",
                hint="The node may be out of memory: ask for more with mem_per_gpu.",
            ) from None
        if kind == "copied":
            checksums, problem = values
            return checksums, problem
        raise (
            OSError(*values)
            if kind == "os_error"
            else EnvironmentProblem(values[0], hint=values[1])
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it has already ended
        self.process.wait()

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(marshal.dumps(value))
        self.process.stdin.flush()


class HelperPool:
    """Copies groups with as many helpers as there are threads; without helpers where there is
    little to do.
    """

    def __init__(self, copier: SmallFileCopier) -> None:
        self.copier = copier
        self._idle: queue.LifoQueue[Helper] = queue.LifoQueue()
        self._helpers: list[Helper] = []

    def start(self, *, files: int, max_helpers: int) -> None:
        """Start as many helpers as this number of files is worth."""
        count = min(max_helpers, files // FILES_PER_HELPER)
        try:
            for _ in range(count if count > 1 else 0):
                self._helpers.append(Helper(self.copier))
                self._idle.put(self._helpers[-1])
        except OSError:
            pass  # the process limit is reached: work with those that have started

    def copy(self, group: FileGroup) -> CopyResult:
        if not self._helpers:
            return self.copier.copy(group.files, offset=group.offset, size=group.size)
        helper = self._idle.get()
        try:
            return helper.copy(group)
        finally:
            self._idle.put(helper)

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
