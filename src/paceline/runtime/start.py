"""`paceline.start`: a session without a `with` block, which ends when the process does."""

from __future__ import annotations

import atexit
import builtins
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from typing import Any, NoReturn

from paceline.contract import process
from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.run import Run
from paceline.runtime.session import session
from paceline.runtime.step_boundary.stop_consensus import Pruned

_started: _Started | None = None  # the session that is open


def start(**settings: Any) -> Run:
    """Open a training session for a script without a `with` block: `run = paceline.start(seed=0)`.

    It takes the arguments of `paceline.session`, and ends with the process: at the end of the
    script it saves and leaves together with the other ranks. After an uncaught exception, Ctrl-C or
    `sys.exit` with an error it leaves at once. `run.end()` ends it earlier, as before a second
    start in a notebook.

    Raises:
        UsageError: A setting is invalid, or a session is already open in this process.
    """
    global _started
    opened = session(**settings)
    run = opened.__enter__()
    _started = _Started(opened, run)
    run._end = _started.end_by_script
    return run


class _Started:
    """An open session, and the hooks that end it with the process."""

    def __init__(self, opened: session, run: Run) -> None:
        self._session, self._run = opened, run
        self._pid = os.getpid()  # forked children inherit the hooks, but not the session
        # the exit code and the step of the last call of sys.exit: Python doesn't tell them at exit
        self._exit: tuple[Any, int] = (None, -1)
        places = [(sys, "exit"), (builtins, "exit"), (builtins, "quit")]
        self._replaced = [
            (module, name, getattr(module, name))
            for module, name in places
            if hasattr(module, name)
        ]
        for module, name, _ in self._replaced:
            setattr(module, name, self._on_exit)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such processes skip atexit
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)

    def end(self, error: BaseException | None = None) -> None:
        """End the session, as leaving a `with` block does, and remove the hooks."""
        global _started
        if not self._is_open:
            raise UsageError("The session has ended.", hint="Call run.end once.")
        _started = None
        atexit.unregister(self._at_exit)
        for module, name, replaced in self._replaced:
            if getattr(module, name) == self._on_exit:
                setattr(module, name, replaced)
        self._session.__exit__(
            type(error) if error else None, error, error.__traceback__ if error else None
        )

    def end_by_script(self) -> None:
        """End the session at the script's request. In a `finally` clause, an exception may be on
        its way.
        """
        error = sys.exc_info()[1]
        if isinstance(error, (StopIteration, GeneratorExit)):  # the end of some iterator
            error = None
        if error is not None and not isinstance(error, SystemExit) and self._is_open:
            note(
                f"run.end() was called during a {type(error).__name__}: the state after the last "
                "save is lost"
            )
        self.end(error)

    @property
    def _is_open(self) -> bool:
        return _started is self and os.getpid() == self._pid

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        if self._is_open and threading.current_thread() is threading.main_thread():
            self._exit = (status, self._run.step)
        raise SystemExit(status)

    def _at_exit(self) -> None:
        if not self._is_open:
            return
        try:
            self.end(self._reason())
        except SystemExit:
            pass
        except BaseException as error:
            # Python would print an error at exit, but still exit with 0.
            sys.excepthook(type(error), error, error.__traceback__)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)

    def _reason(self) -> BaseException | None:
        """Return what ends the process: None at the end of the script."""
        error = sys.exc_info()[1]  # in a child of multiprocessing
        if error is not None:
            return error
        if self._run._pruned:
            return Pruned()
        if process.exit_code is not None:
            return SystemExit(process.exit_code)
        status, step = self._exit
        if status and step == self._run.step:  # a script that trains on has caught it
            return SystemExit(status)
        if hasattr(sys, "ps1"):  # a notebook or a console, where an error ends nothing
            return None
        return getattr(sys, "last_value", None)
