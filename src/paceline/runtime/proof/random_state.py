"""Whether a script draws random numbers between two moments, and other numbers for it to draw."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

OTHER_SEED = 987_654_321


def read_state() -> list[Any]:
    """Return the states of the global generators: torch's of the CPU and of this GPU, Python's and
    NumPy's.
    """
    found: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_gpu and not torch.cuda.is_current_stream_capturing():
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        found.append((name, keys.tobytes(), *rest))
    return found


def draw_others(number: int) -> None:
    """Let the global generators go on with other random numbers, the same ones for the same
    `number`.
    """
    seed = OTHER_SEED + number
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
