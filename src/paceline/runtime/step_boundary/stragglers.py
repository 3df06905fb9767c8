"""Find ranks that are slower than the others, without slowing any of them.

All ranks take equally long for a whole step: the slow one works while the others wait for it. What
differs is the time from the boundary to the backward pass, before the first exchange of gradients:
waiting for data, and the forward pass. One step per consensus is measured, and the result travels
with the consensus.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from typing import Any

import torch

from paceline.contract.foreign_records import LineWriter
from paceline.runtime.console import note

MAX_RANKS = 1024  # in larger worlds the consensus has no slot per rank
WINDOW = 7  # measurements whose median counts, so that one hiccup does not make a straggler
MIN_MEASUREMENTS = 3
MIN_SHARE = 0.1  # of the step time that a rank must cost the others before it is reported
MIN_SECONDS = 0.005  # that it must cost them, too: in shorter steps, differences are noise
MIN_DURATION = 10.0  # seconds, at least: short runs have no stragglers
PAIR_FACTOR = 2.0  # at least, if there are only two ranks: neither of them is "the others"
REPEAT_AFTER = 300.0  # seconds before the same rank is reported again


class StragglerDetector:
    """Measures this rank's own time per step. On rank 0, also compares all ranks."""

    def __init__(
        self,
        lines: LineWriter,
        *,
        rank: int,
        hosts: list[str],
        world_size: int,
        factor: float,
        device: Any,
    ) -> None:
        self.on = 1 < world_size <= MAX_RANKS and factor > 0
        self.slots = world_size if self.on else 0  # in the consensus
        self._lines = lines
        self._rank, self._hosts, self._factor = rank, hosts, factor
        self._cuda = device.type == "cuda"
        self._measured: deque[float] = deque(maxlen=WINDOW)
        self._start: Any = None
        self._pending: tuple[Any, Any] | None = None  # CUDA events that have not completed
        self._slow_since: dict[int, float] = {}
        self._reported: dict[int, float] = {}

    # -- measure

    def mark_start(self) -> None:
        """Measure the step that begins now. Called at the end of a boundary."""
        self._start = self._timestamp()

    def mark_backward(self) -> None:
        """End the measurement, before the backward pass."""
        if self._start is None:
            return
        start, self._start = self._start, None
        if self._cuda:
            self._pending = (start, self._timestamp())
        else:
            self._measured.append(time.perf_counter() - start)

    def discard(self) -> None:
        """Drop a measurement that began in another loop."""
        self._start = None

    def _timestamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def own_seconds(self) -> float:
        """Return the seconds that this rank takes for its own part of a step; 0 while unknown."""
        if self._pending is not None and self._pending[1].query():
            start, end = self._pending
            self._pending = None
            self._measured.append(start.elapsed_time(end) / 1000)
        return statistics.median(self._measured) if len(self._measured) >= MIN_MEASUREMENTS else 0.0

    # -- compare

    def report(
        self, seconds: list[float], *, step: int, epoch: int, seconds_per_step: float
    ) -> None:
        """Print and log ranks that have been slow for a while. Called after a consensus; acts on
        rank 0.
        """
        if self._rank:
            return
        min_seconds = max(MIN_SECONDS, MIN_SHARE * seconds_per_step)
        slow = find_stragglers(seconds, factor=self._factor, min_seconds=min_seconds)
        now = time.monotonic()
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow}
        due = {
            rank: ratio
            for rank, ratio in slow.items()
            if now - self._slow_since[rank] >= MIN_DURATION
            and now - self._reported.get(rank, -math.inf) >= REPEAT_AFTER
        }
        if not due:
            return
        self._reported.update(dict.fromkeys(due, now))
        ratios = {str(rank): round(ratio, 2) for rank, ratio in due.items()}
        line = {"step": step, "epoch": epoch, "time": round(time.time(), 6), "stragglers": ratios}
        self._lines.append(json.dumps(line) + "\n")
        for rank, ratio in due.items():
            host = f" on {self._hosts[rank]}" if rank < len(self._hosts) else ""
            is_pair = len(seconds) == 2
            peers, reference = (
                (f"rank {1 - rank}", "as long") if is_pair else ("the others", "the median")
            )
            text = (
                f"{ratio:.1f} times {reference}, {seconds[rank] * 1000:.1f} ms of its own time "
                "per step"
            )
            note(f"rank {rank}{host} is slower than {peers}: {text}")


def find_stragglers(seconds: list[float], *, factor: float, min_seconds: float) -> dict[int, float]:
    """Return ranks slower than the median by `factor` and by `min_seconds`, slowest first, with
    their ratio to it.

    Of two ranks, one must take at least twice as long as the other.
    """
    known = sorted(each for each in seconds if each > 0)
    if len(known) < 2:
        return {}
    factor = max(factor, PAIR_FACTOR) if len(seconds) == 2 else factor
    # the lower one: of two ranks, the faster is the reference
    median = known[(len(known) - 1) // 2]
    slow = {
        rank: each / median
        for rank, each in enumerate(seconds)
        if each > median * factor and each - median > min_seconds
    }
    return dict(sorted(slow.items(), key=lambda item: -item[1]))
