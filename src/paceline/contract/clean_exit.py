"""What keeps a rank from hanging or aborting when it exits: torch's threads need the GIL until
they stop.
"""

from __future__ import annotations

import atexit
import functools
import re
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Threads of torch that release Python objects after each collective or backward pass, and need the
# GIL for it.
TORCH_THREADS = ("pt_gloo_runloop", "pt_autograd")
EXIT_TIMEOUT = 2.0  # seconds for these threads to come to rest at exit
# Seconds: longer than a thread waits between two tries to take the GIL, and than a collective that
# nobody waited for pauses until another rank answers.
_AT_REST = 0.05


def protect_ranks() -> None:
    """Protect this process, which may not have imported torch yet, and those that it starts with
    `mp.spawn`.
    """
    wait_for_torch_at_exit()
    for name, function in (
        ("torch.distributed", keep_process_groups),
        ("torch.multiprocessing.spawn", _protect_spawned),
    ):
        if name in sys.modules:
            function(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, function))


@functools.cache
def keep_process_groups(distributed: Any) -> None:
    """Keep each process group until the C++ objects that use it are gone. Takes the module
    `torch.distributed`.

    Torch releases the GIL when the last Python reference frees a group, but not when DDP's reducer
    does. Freeing a group joins its threads, and they need the GIL: the process would hang
    (docs/upstream/gloo-exit-deadlock.md).
    """
    # A logger owns a reducer, and a reducer owns a group.
    for user, used in (("Logger", "Reducer"), ("Reducer", "ProcessGroup")):
        if hasattr(distributed, user):
            _keep_arguments(getattr(distributed, user), getattr(distributed, used))


def _keep_arguments(user: Any, used: type) -> None:
    construct = user.__init__

    @functools.wraps(construct)
    def construct_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, used):
                # pybind11 clears weak references after the C++ object is gone, so the argument
                # outlives it.
                weakref.finalize(self, id, argument).atexit = False

    user.__init__ = construct_and_keep


@functools.cache
def _protect_spawned(spawn: Any) -> None:
    """Have `start_processes`, and so `mp.spawn`, protect the processes. Takes the module that
    defines it.
    """
    start = spawn.start_processes

    @functools.wraps(start)
    def start_protected(
        fn: Callable[..., Any], args: tuple[Any, ...] = (), *rest: Any, **named: Any
    ) -> Any:
        return start(_run_protected, (fn, *args), *rest, **named)

    spawn.start_processes = start_protected
    sys.modules["torch.multiprocessing"].start_processes = start_protected  # type: ignore[attr-defined]


def _run_protected(rank: int, function: Callable[..., Any], *args: Any) -> None:
    protect_ranks()
    function(rank, *args)


class _AfterImport:
    """A finder that calls a function with the finished module, as soon as it is imported.

    It stays in `sys.meta_path`: another thread that goes through the list would miss a finder.
    """

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self.function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def keep_forever(*objects: object) -> None:
    """Keep these objects alive until the process is gone.

    Freeing a process group waits for its collectives, even at interpreter exit. After an error,
    peers may never answer.
    """
    import ctypes  # not at the top: most ranks never need it

    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@functools.cache
def wait_for_torch_at_exit() -> None:
    """Have torch's threads come to rest before the interpreter shuts down.

    A thread that asks for the GIL during the shutdown aborts the process: a rank that is done would
    count as failed. Call this before `import torch`, so that it runs after all other handlers.
    """
    atexit.register(_wait_for_torch_threads)


def _wait_for_torch_threads() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT
    before: dict[str, list[str]] = {}
    while time.monotonic() < deadline:
        now = _torch_threads() if "torch" in sys.modules else {}
        # A thread that sleeps throughout, while it could take the GIL, is not waiting for it.
        if now == before and all("sleeping" in status[0] for status in now.values()):
            return
        before = now
        time.sleep(_AT_REST)


def _torch_threads() -> dict[str, list[str]]:
    """Return, for each of torch's threads, its state and how often it has run."""
    threads = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith(TORCH_THREADS):
                status = (task / "status").read_text()
                threads[task.name] = re.findall(r"(?:State|\w*ctxt_switches):.*", status)
    return threads
