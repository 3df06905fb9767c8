"""How long each phase of a start takes, up to the end of the first step."""

from __future__ import annotations

import time


class StartPhases:
    """A clock with names: each mark says how long it is since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now

    def take_out(self, name: str, seconds: float) -> None:
        """Count a part of the phase that goes on under another name."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self._last += seconds

    def finish(self, waited: float) -> dict[str, float]:
        """Return all phases. The last two are the first batch, for which the loop has waited, and
        the first step.
        """
        took = time.perf_counter() - self._last
        self.seconds["first_batch"] = round(waited, 3)
        self.seconds["first_step"] = round(max(0.0, took - waited), 3)
        return self.seconds
