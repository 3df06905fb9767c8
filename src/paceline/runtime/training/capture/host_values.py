"""What a captured step must not do: wait for the device, or use values that only the host knows."""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import paceline
from paceline.errors import UsageError

WAIT_HINT = (
    "Move it out of the function that you pass to run.capture, or leave it on the device: "
    "run.log(loss=loss) takes "
    "tensors, and torch.where replaces an `if`."
)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(paceline.__file__).parent))


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise UsageError, with the script's line, where the body waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise wait_error(error.__traceback__) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def wait_error(trace: TracebackType | None) -> UsageError:
    """Return the error for a step that waits for the device."""
    where = script_line(trace)
    at = f" at {where}" if where else ""
    return UsageError(f"The step of run.capture waits for the device{at}.", hint=WAIT_HINT)


def script_line(trace: TracebackType | None) -> str | None:
    """Return the innermost line of a traceback that is not torch's or ours."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            text = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename}:{frame.lineno}: {text}"
    return None


@contextlib.contextmanager
def no_host_randomness() -> Iterator[None]:
    """Raise UsageError if the body draws random numbers on the host: they would be the same in
    every step.
    """
    before = {name: state() for name, state in _generators().items()}
    yield
    for name, state in _generators().items():
        if name in before and state() != before[name]:
            raise UsageError(
                f"The step of run.capture draws random numbers from {name}, which would be the "
                "same in every step.",
                hint="Draw them on the device, as in torch.rand(n, device=run.device), or outside "
                "of the function.",
            )


def _generators() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "Python's random": random.getstate,
        "torch on the CPU": lambda: torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["NumPy"] = lambda: _hashable(numpy.random.get_state(legacy=True))
    return found


def _hashable(state: Any) -> Any:
    return tuple(each.tobytes() if hasattr(each, "tobytes") else each for each in state)
