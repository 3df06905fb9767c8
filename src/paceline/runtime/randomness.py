"""Seeds, and the generators of a rank: Python's, NumPy's, torch's, and its GPU's.

Those of the host (all but the GPU's) are what datasets use.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """Return a well-mixed 64-bit seed that depends on all the numbers (splitmix64, folded over
    them).
    """
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_host(seed: int) -> None:
    """Seed the generators that datasets use: Python's, NumPy's and torch's on the CPU. Takes a few
    microseconds.

    `torch.manual_seed` would also reseed the GPU generators, which the model's dropout uses.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """Restore the host generators on exit: loading data in the main process must not disturb the
    model.
    """
    state = _capture_host()
    try:
        yield
    finally:
        restore(state)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch on every device; `deterministic` also selects repeatable
    kernels.
    """
    seed &= _MASK
    seed_host(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is created, and can't be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_rank(*, seed: int, step: int, rank: int) -> None:
    """Seed all generators for this rank and step, as a resume with another number of ranks does."""
    seed_everything(derive_seed(seed, step, rank))


def host_state() -> tuple[Any, ...]:
    """Return the states of the host generators in a form that can be compared."""
    state = _capture_host()
    arrays = [
        each.tobytes() if hasattr(each, "tobytes") else each for each in state.get("numpy", ())
    ]
    return state["python"], state["torch"].numpy().tobytes(), arrays


def _capture_host() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=True)
    return state


def capture() -> dict[str, Any]:
    """Return the state of all generators as a tree of plain values and small tensors."""
    state = _capture_host()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
