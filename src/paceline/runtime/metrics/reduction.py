"""Numbers of several steps, on their way from the device of each rank to one line per step."""

from __future__ import annotations

import functools
import math
import re
import time
import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from paceline.runtime.metrics.throughput import Amounts

# One call of `log`: step, epoch, weight of these values, time, the values.
Entry = tuple[int, int, float, float, dict[str, Any]]
LEARNING_RATE = re.compile(r"(.*/)?(lr|learning_rate)([_-]?\d+|/.*)?", re.IGNORECASE)


class PendingScalars:
    """Scalars being copied from a device to the host, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._event: Any = None
        # The test is far cheaper than what it saves, and a small step is logged thousands of times
        # a second.
        stacked = torch.stack(
            [
                each if each.dtype is dtype and not each.dim() else each.reshape(()).to(dtype)
                for each in tensors
            ]
        )
        if stacked.device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = stacked.cpu()

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        found: list[float] = self._host.tolist()
        return found

    @property
    def is_on_its_way(self) -> bool:
        return self._event is not None and not self._event.query()

    def arrives(self, *, within: float) -> bool:
        """Return whether the values arrive in time. A device may hang in a collective that peers
        never answer.
        """
        deadline = time.monotonic() + within
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class Row:
    """What one step logged: sums of value x weight, sums of weights, and text."""

    __slots__ = ("epoch", "sums", "texts", "time", "weights")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.time = 0.0
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.texts: dict[str, str] | None = None

    def means(self) -> dict[str, float]:
        weights = self.weights
        for weight in weights.values():
            if weight != 1:
                break
        else:  # the common case, kept fast
            return self.sums
        return {
            name: total / weights[name] if weights[name] else math.nan
            for name, total in self.sums.items()
        }


class Batch:
    """Rows that are reduced together."""

    def __init__(
        self, entries: list[Entry], *, alone: bool, processed: Callable[[], Amounts] | None = None
    ) -> None:
        self.entries = entries
        # what `ranks` ranks have processed; known once it is folded
        self.amounts: Amounts | None = None
        self.ranks = 1
        self.processed = processed
        tensors = [
            value
            for entry in entries
            for value in entry[4].values()
            if isinstance(value, torch.Tensor)
        ]
        self._pending = PendingScalars(tensors) if tensors else None
        self.rows: dict[int, Row] = {}
        self._reduced = torch.empty(0)
        self._has_numbers_of_all = False
        self.work: Any = None
        # A hash of steps, names and kinds, which all ranks must share for their numbers to be
        # reduced.
        self.schema = 0
        if not alone:
            described = []
            for step, _, _, _, values in entries:
                texts = [name for name, value in values.items() if type(value) is str]
                described.append(f"{step} {' '.join(values)} {texts}")
            self.schema = zlib.crc32("\n".join(described).encode()) * 65536 + len(entries) % 65536

    @property
    def is_on_its_way(self) -> bool:
        """Whether there are numbers that the device has yet to compute, or to copy."""
        return self._pending is not None and self._pending.is_on_its_way

    def arrives(self, *, within: float) -> bool:
        return self._pending is None or self._pending.arrives(within=within)

    def fold(self) -> None:
        """Turn entries into rows, once the numbers have arrived from the device."""
        arrived = iter(self._pending.values() if self._pending else ())
        rows = self.rows
        for step, epoch, weight, when, values in self.entries:
            row = rows.get(step)
            if row is None:
                row = rows[step] = Row(epoch)
            row.time = when
            sums, weights = row.sums, row.weights
            for name, value in values.items():
                kind = type(value)
                if kind is str:
                    row.texts = {**(row.texts or {}), name: value}
                    continue
                number = value if kind is float or kind is int else next(arrived)
                if _is_learning_rate(name):
                    sums[name], weights[name] = number, 1.0
                    continue
                # An empty slice weighs nothing, whatever its loss is.
                share = number * weight if weight else 0.0
                if name in sums:
                    sums[name] += share
                    weights[name] += weight
                else:
                    sums[name], weights[name] = share, weight
        self.entries = []
        if self.processed is not None:
            self.amounts = self.processed()

    def reduce(self, group: Any, *, same_names: bool) -> None:
        """Add up what all ranks have processed and, if they have logged the same names, their
        numbers.
        """
        assert self.amounts is not None
        flat: list[float] = list(self.amounts)
        self._has_numbers_of_all = same_names
        if same_names:
            for row in self.rows.values():
                flat += row.sums.values()
                flat += row.weights.values()
        self._reduced = torch.tensor(flat, dtype=torch.float64)
        self.work = dist.all_reduce(self._reduced, group=group, async_op=True)
        self.ranks = dist.get_world_size(group)

    def store_reduced(self) -> None:
        """Put the reduced numbers into their rows."""
        if self.work is None:
            return
        self.work.wait()
        numbers = iter(self._reduced.tolist())
        self.amounts = Amounts(*islice(numbers, len(Amounts._fields)))
        if self._has_numbers_of_all:
            for row in self.rows.values():
                row.sums = {name: next(numbers) for name in row.sums}
                row.weights = {name: next(numbers) for name in row.weights}

    def means(self) -> dict[int, dict[str, float]]:
        """Return the means of each step."""
        return {step: row.means() for step, row in self.rows.items()}


@functools.lru_cache(maxsize=1024)
def _is_learning_rate(name: str) -> bool:
    return LEARNING_RATE.fullmatch(name) is not None
