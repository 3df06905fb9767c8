"""Ranks that are slower than the others, found without slowing any of them.

In lock step all ranks take equally long for a step: the slow one works, the others wait for it. What tells them
apart is the time from the boundary to the backward pass, ahead of the first exchange of gradients: waiting for
data, and the forward pass. It is taken for one step between two agreements, and travels with the agreement.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from typing import Any

import torch

from paceline.contract.jsonl import LineWriter

LARGEST_WORLD = 1024  # ranks up to which each has its own place in the agreement
KEPT = 7  # measurements whose median is a rank's pace: one hiccup is no straggler
AT_LEAST = 3
MATTERS = 0.1  # of the step's time: what a rank must cost the others to be worth a word
IN_A_ROW = 3  # agreements
SAY_AGAIN = 300.0  # seconds until the same rank is named again


class StragglerDetector:
    """This rank's own time per step; on rank 0 also the judgement of all."""

    def __init__(
        self, lines: LineWriter, *, rank: int, hosts: list[str], world_size: int, factor: float, device: Any
    ) -> None:
        self.on = 1 < world_size <= LARGEST_WORLD and factor > 0
        self.words = world_size if self.on else 0
        self._lines = lines
        self._rank, self._hosts, self._factor = rank, hosts, factor
        self._cuda = device.type == "cuda"
        self._measured: deque[float] = deque(maxlen=KEPT)
        self._began: Any = None
        self._coming: tuple[Any, Any] | None = None  # events of a device, not yet passed
        self._slow_for: dict[int, int] = {}
        self._said: dict[int, float] = {}

    # -- measuring -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the end of a boundary: the step that begins now is measured."""
        self._began = self._mark()

    def reached_backward(self) -> None:
        if self._began is None:
            return
        began, self._began = self._began, None
        if self._cuda:
            self._coming = (began, self._mark())
        else:
            self._measured.append(time.perf_counter() - began)

    def forget(self) -> None:
        """The step that was begun lies in another loop."""
        self._began = None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def own(self) -> float:
        """Seconds that this rank takes for its own part of a step; 0 while that is not known."""
        if self._coming is not None and self._coming[1].query():
            began, ended = self._coming
            self._coming = None
            self._measured.append(began.elapsed_time(ended) / 1000)
        return statistics.median(self._measured) if len(self._measured) >= AT_LEAST else 0.0

    # -- judging ---------------------------------------------------------------------------------------

    def judge(self, paces: list[float], *, step: int, epoch: int, seconds_per_step: float) -> None:
        """Rank 0, after an agreement: name who has been slow for a while."""
        if self._rank:
            return
        slow = stragglers(paces, factor=self._factor, least=MATTERS * seconds_per_step)
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        now = time.monotonic()
        due = {
            rank: times
            for rank, times in slow.items()
            if self._slow_for[rank] >= IN_A_ROW and now - self._said.get(rank, -SAY_AGAIN) >= SAY_AGAIN
        }
        if not due:
            return
        self._said.update(dict.fromkeys(due, now))
        told = {str(rank): round(times, 2) for rank, times in due.items()}
        line = {"step": step, "epoch": epoch, "time": round(time.time(), 6), "stragglers": told}
        self._lines.append(json.dumps(line) + "\n")
        for rank, times in due.items():
            where = f" on {self._hosts[rank]}" if rank < len(self._hosts) else ""
            text = f"{times:.1f} times the median, {paces[rank] * 1000:.1f} ms of its own per step"
            print(
                f"paceline: rank {rank}{where} is slower than the others: {text}", file=sys.stderr, flush=True
            )


def stragglers(paces: list[float], *, factor: float, least: float) -> dict[int, float]:
    """Ranks slower than the median by a factor and by `least` seconds, slowest first; how many times the median."""
    known = sorted(pace for pace in paces if pace > 0)
    if len(known) < 2:
        return {}
    # The lower middle: of two ranks, the faster one is the measure.
    median = known[(len(known) - 1) // 2]
    slow = {
        rank: pace / median
        for rank, pace in enumerate(paces)
        if pace > median * factor and pace - median > least
    }
    return dict(sorted(slow.items(), key=lambda each: -each[1]))
