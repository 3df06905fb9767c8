"""`paceline.start`: a session without a `with` block, which ends when the process does."""

from __future__ import annotations

import atexit
import builtins
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
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
    `sys.exit` with an error it leaves at once. `run.end()` ends it earlier. In a notebook or
    another interactive session, errors leave it open, signals keep their meaning, and starting a
    new session ends the previous one.

    Raises:
        UsageError: A setting is invalid, or a session is already open in this process.
    """
    global _started
    opened = session(**settings)
    if _started is not None and is_interactive():
        note("ending the session that was open")
        _started.end()
    run = opened.__enter__()
    _started = _Started(opened, run)
    if is_interactive():
        opened.ignore_signals()
    run._end = _started.end_early
    return run


def is_interactive() -> bool:
    """Return whether code is typed in, as in a notebook, so that an error does not end the
    process.
    """
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


@dataclass
class _ExitCall:
    """A call of sys.exit. Python doesn't tell at exit whether the script caught the SystemExit, so
    a witness does.
    """

    status: Any
    step: int
    caught: bool | None = None  # None while something still refers to the exception


class _Witness:
    """An attribute of a SystemExit: it is freed with it, below a frame of the script only if that
    caught it.
    """

    def __init__(self, call: _ExitCall) -> None:
        self._call = call

    # bound here: Python clears modules at its end
    def __del__(self, getframe: Any = sys._getframe) -> None:
        self._call.caught = getframe().f_back is not None


def _witnessed_exit(call: _ExitCall) -> SystemExit:
    # Not a variable of the function that raises it: the exception would refer to itself through its
    # traceback.
    leaving = SystemExit(call.status)
    leaving._paceline = _Witness(call)  # type: ignore[attr-defined]
    return leaving


class _Started:
    """An open session, and the hooks that end it with the process."""

    def __init__(self, opened: session, run: Run) -> None:
        self._session, self._run = opened, run
        self._pid = os.getpid()  # forked children inherit the hooks, but not the session
        self._exit: _ExitCall | None = None  # the last one
        self._hooks = (
            sys.excepthook,
            sys.exit,
            {name: getattr(builtins, name, None) for name in ("exit", "quit")},
        )
        sys.excepthook, sys.exit = self._on_error, self._on_exit
        for name in self._hooks[2]:
            setattr(builtins, name, self._on_exit)
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
        excepthook, leave, others = self._hooks
        if sys.excepthook == self._on_error:
            sys.excepthook = excepthook
        if sys.exit == self._on_exit:
            sys.exit = leave
        for name, other in others.items():
            if getattr(builtins, name, None) == self._on_exit:
                setattr(builtins, name, other)
        self._session.__exit__(
            type(error) if error else None, error, error.__traceback__ if error else None
        )

    def end_early(self) -> None:
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

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Leave after an uncaught exception, then print it: `sys.excepthook`."""
        if self._is_open and not is_interactive():
            try:
                self.end(error)
            # a better error, such as for a GPU that is out of memory
            except BaseException as explained:
                kind, error, trace = type(explained), explained, explained.__traceback__
        self._hooks[0](kind, error, trace)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Remember the exit code, which is not known at exit: `sys.exit`."""
        if self._is_open and threading.current_thread() is threading.main_thread():
            self._exit = _ExitCall(status, self._run.step)
            raise _witnessed_exit(self._exit)
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
            self._hooks[0](type(error), error, error.__traceback__)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)

    def _reason(self) -> BaseException | None:
        """Return what ends the process: None at the end of the script."""
        error = sys.exc_info()[1]  # in a child of multiprocessing
        if error is None and self._run._pruned:
            return Pruned()
        if error is None and process.exit_code is not None:
            return SystemExit(process.exit_code)
        if error is None and self._exit is not None and self._is_uncaught(self._exit):
            return SystemExit(self._exit.status)
        return error or _uncaught_error()

    def _is_uncaught(self, call: _ExitCall) -> bool:
        """Return whether the process ends by this call. If in doubt, it doesn't, so that the last
        state is saved.

        Unless there are other ranks: this one would wait for them, and they may train on.
        """
        if call.caught is None:
            return self._run.world_size > 1 and call.step == self._run.step
        return not call.caught


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends the process, for scripts that have replaced `sys.excepthook`.

    Others may print an exception in the same way and go on. One that ends the process has left its
    outermost frame.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else None
    if trace is None or is_interactive():
        return None
    outermost = trace.tb_frame
    at_top = outermost.f_back is None and outermost.f_globals.get("__name__") in (
        "__main__",
        "runpy",
    )
    return error if at_top else None
