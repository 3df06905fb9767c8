"""What keeps a rank from hanging or aborting when it exits: torch's threads need the GIL until
they stop.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Threads of torch that release Python objects after each collective or backward pass, and need the
# GIL for it.
TORCH_THREADS = ("pt_gloo_runloop", "pt_autograd")
EXIT_TIMEOUT = 2.0  # seconds for these threads to come to rest at exit
_SAMPLE_INTERVAL = 0.01  # seconds; longer than a thread waits between two tries to take the GIL
_SAMPLES_AT_REST = 5  # a collective that nobody waited for may pause until another rank answers


def protect_ranks() -> None:
    """Protect this process, which may not have imported torch yet, and those that it starts with
    `mp.spawn`.
    """
    wait_for_torch_at_exit()
    _when_imported("torch.distributed", keep_process_groups)
    _when_imported("torch.multiprocessing.spawn", _protect_spawned)


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
    start = getattr(spawn, "start_processes", None)
    if start is None:
        return

    @functools.wraps(start)
    def start_protected(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start(_ProtectedFunction(fn) if _is_importable() else fn, *args, **kwargs)

    spawn.start_processes = start_protected
    package = sys.modules.get("torch.multiprocessing")
    if getattr(package, "start_processes", None) is start:
        package.start_processes = start_protected  # type: ignore[union-attr]


class _ProtectedFunction:
    """A function that protects the process in which it is unpickled. A forked process is protected
    already.

    A new process has imported torch by then, so its threads come to rest before some handlers of
    the script run.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _protect_and_return, (self._function,)


def _protect_and_return(function: Callable[..., Any]) -> Callable[..., Any]:
    protect_ranks()
    return function


def _is_importable() -> bool:
    """Return whether a new process finds this package: the script may have a file or a package of
    the same name.
    """
    name = __name__.partition(".")[0]
    spec, ours = _find_spec(name), sys.modules[name].__spec__
    return spec is not None and ours is not None and spec.origin == ours.origin


def _when_imported(name: str, function: Callable[[Any], None]) -> None:
    """Call the function with this module: now, or as soon as it is imported."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport:
    """A finder that leaves the import to the others, and calls a function with the finished module.

    It stays in `sys.meta_path`: another thread that goes through the list would miss a finder.
    """

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name = name
        self.function = function
        self.is_done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self.is_done:
            return None
        self.is_done = True
        spec = _find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self.function)
        return spec


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """Ask all finders. `importlib.util.find_spec` would wait for the package, perhaps imported by
    another thread.
    """
    for finder in [*sys.meta_path]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


class _CallingLoader:
    """A loader that calls a function with the finished module. It is not seen afterwards."""

    def __init__(self, loader: Any, function: Callable[[Any], None]) -> None:
        self.loader = loader
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.function(module)


def abandon_process_groups(distributed: Any) -> None:
    """Leave all process groups after an error, without waiting for peers that may never answer.

    Freeing a group waits for its collectives, even at interpreter exit.
    """
    keep_forever(*getattr(getattr(distributed, "distributed_c10d", None), "_pg_map", ()))


def keep_forever(*objects: object) -> None:
    """Keep these objects alive until the process is gone."""
    import ctypes

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
    if "torch" not in sys.modules:
        return
    if not os.path.exists("/proc/self/task"):
        time.sleep(0.1)
        return
    deadline = time.monotonic() + EXIT_TIMEOUT
    before: dict[str, str] = {}
    samples = 0
    while (now := _torch_threads()) and time.monotonic() < deadline:
        # A thread that sleeps throughout, while it could take the GIL, is not waiting for it.
        asleep = all("State:\tS" in status for status in now.values())
        samples = samples + 1 if asleep and now == before else 0
        if samples == _SAMPLES_AT_REST:
            return
        before = now
        time.sleep(_SAMPLE_INTERVAL)


def _torch_threads() -> dict[str, str]:
    """Return, for each of torch's threads, its state and how often it has run."""
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(TORCH_THREADS):
                lines = (task / "status").read_text().splitlines()
                kept = [
                    line for line in lines if line.startswith("State:") or "ctxt_switches" in line
                ]
                threads[task.name] = "\n".join(kept)
        except OSError:
            continue  # it has ended
    return threads
