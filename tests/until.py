"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WITHIN = 150.0  # seconds; for a busy machine


def until(
    condition: Callable[[], Any],
    what: str = "it does not happen",
    *,
    details: Callable[[], str] = str,
    within: float = WITHIN,
    pause: float = 0.05,
) -> Any:
    """Wait until the condition holds, and return its value. A condition that starts a process needs a longer pause."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}\n{details()}"
        time.sleep(pause)
    return found
