"""Numbers that a script logs: kept where they are, reduced across ranks later, written by rank 0.

`log` costs a list append and, for a tensor on a device, one copy on that device; nothing waits for it. At each
agreement of the ranks (a few times a second) a batch of what was logged moves one stage on:

    logged  →  copying from the device  →  names agreed on  →  being reduced  →  written

Ranks must have logged the same names for the same steps; where they have not (`if run.rank == 0: run.log(...)`)
rank 0's own numbers are written.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.runtime.events import Lines


class Deferred:
    """Scalars of a device on their way to the host, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._event: Any = None
        stacked = torch.stack([tensor.reshape(()).float() for tensor in tensors])
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


class _Row:
    """What one step logged: sums of value x weight, and of weights."""

    __slots__ = ("epoch", "order", "samples", "sums", "texts", "time", "weights")

    def __init__(self, epoch: int, samples: int, time: float, order: int) -> None:
        self.epoch, self.samples, self.time, self.order = epoch, samples, time, order
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.texts: dict[str, str] = {}


class _Batch:
    """Rows that travel together."""

    def __init__(self, entries: list[tuple[int, int, int, float, float, dict[str, Any]]]) -> None:
        self.entries = entries
        tensors = [
            value for *_, values in entries for value in values.values() if isinstance(value, torch.Tensor)
        ]
        self._coming = Deferred(tensors) if tensors else None
        self.rows: dict[int, _Row] = {}
        self.numbers = torch.empty(0)
        self.work: Any = None
        # Which steps and names: what ranks must have in common for their numbers to be added up.
        words = "\n".join(f"{step} {' '.join(values)}" for step, *_, values in entries)
        self.schema = zlib.crc32(words.encode()) * 65536 + len(entries) % 65536

    def fold(self) -> None:
        """Rows from entries, once the device's numbers are here."""
        arrived = iter(self._coming.values() if self._coming else ())
        for step, epoch, samples, weight, when, values in self.entries:
            row = self.rows.get(step)
            if row is None:
                row = self.rows[step] = _Row(epoch, samples, when, step)
            row.time = when
            for name, value in values.items():
                if isinstance(value, str):
                    row.texts[name] = value
                    continue
                number = next(arrived) if isinstance(value, torch.Tensor) else value
                # A slice that only keeps step weighs nothing, whatever its loss is.
                row.sums[name] = row.sums.get(name, 0.0) + (number * weight if weight else 0.0)
                row.weights[name] = row.weights.get(name, 0.0) + weight
        self.entries = []

    def reduce(self, group: Any) -> None:
        flat = [
            number for row in self.rows.values() for number in (*row.sums.values(), *row.weights.values())
        ]
        self.numbers = torch.tensor(flat, dtype=torch.float64)
        if group is not None and flat:
            self.work = dist.all_reduce(self.numbers, group=group, async_op=True)

    def take(self) -> None:
        if self.work is not None:
            self.work.wait()
        numbers = iter(self.numbers.tolist())
        for row in self.rows.values():
            row.sums = {name: next(numbers) for name in row.sums}
            row.weights = {name: next(numbers) for name in row.weights}


class Metrics:
    """The log of a session. Every rank logs; rank 0 writes `metrics.jsonl`."""

    def __init__(self, lines: Lines, *, group: Any, rank: int) -> None:
        self.latest: dict[str, float] = {}
        self._lines = lines
        self._group = group
        self._rank = rank
        self._entries: list[tuple[int, int, int, float, float, dict[str, Any]]] = []
        self._offered: _Batch | None = None  # its schema is being agreed on
        self._reducing: _Batch | None = None
        self._previous: tuple[int, float] | None = None
        self._told_apart = False

    def log(self, step: int, *, epoch: int, samples: int, weight: float, values: dict[str, Any]) -> None:
        for name, value in values.items():
            kind = type(value)
            if kind is float or kind is int or kind is str:
                continue
            values[name] = _kept(name, value)
        self._entries.append((step, epoch, samples, weight, time.time(), values))

    # -- one stage on, at each agreement ---------------------------------------------------------------

    def offer(self) -> float:
        """Close the batch at hand, and name its schema for the agreement that is launched now."""
        assert self._offered is None
        self._offered = _Batch(self._entries)
        self._entries = []
        return float(self._offered.schema)

    def advance(self, same: bool) -> None:
        """After an agreement: the batch before is written, the offered one begins to be reduced."""
        if self._reducing is not None:
            self._write(self._reducing)
            self._reducing = None
        batch, self._offered = self._offered, None
        if batch is None or not batch.entries:
            return
        batch.fold()
        batch.reduce(self._group if same else None)
        if not same and not self._told_apart and self._rank == 0:
            self._told_apart = True
            print(
                "paceline: ranks log different names or steps; rank 0's own numbers are written", flush=True
            )
        self._reducing = batch
        if batch.work is None:
            self.advance(True)

    def finish_alone(self) -> None:
        """After an error: what rank 0 has of its own, with no word from the others."""
        self._reducing = None
        for batch in (self._offered, _Batch(self._entries)):
            if batch is not None and batch.entries:
                batch.fold()
                batch.reduce(None)
                self._write(batch)
        self._offered, self._entries = None, []

    def _write(self, batch: _Batch) -> None:
        batch.take()
        lines = []
        for step, row in batch.rows.items():
            values = {
                name: total / row.weights[name] if row.weights[name] else math.nan
                for name, total in row.sums.items()
            }
            self.latest.update(values)
            if self._rank == 0:
                lines.append(self._line(step, row, values))
        if lines:
            self._lines.append("".join(lines))

    def _line(self, step: int, row: _Row, values: dict[str, float]) -> str:
        record: dict[str, Any] = {"step": step, "epoch": row.epoch, "time": row.time}
        if self._previous is not None and step > self._previous[0]:
            seconds = (row.time - self._previous[1]) / (step - self._previous[0])
            record["seconds"] = round(seconds, 6)
            if row.samples and seconds > 0:
                record["samples_per_second"] = round(row.samples / seconds, 1)
        if self._previous is None or step > self._previous[0]:
            self._previous = (step, row.time)
        # NaN and infinities are not JSON: a reader must be able to trust every line.
        record.update((name, value if math.isfinite(value) else str(value)) for name, value in values.items())
        record.update(row.texts)
        return json.dumps(record) + "\n"


def _kept(name: str, value: Any) -> Any:
    """A value as it is now: later changes in place (a CUDA graph's output, a running sum) must not reach it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"log({name}=...) got a tensor of shape {tuple(value.shape)}",
                hint="Log numbers: take the mean or the sum first.",
            )
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        return value.item() if value.device.type == "cpu" else value.detach().clone()
    if isinstance(value, bool):
        return int(value)
    if hasattr(value, "item"):
        return value.item()
    raise UsageError(
        f"log({name}=...) got a {type(value).__name__}", hint="Log numbers, one-element tensors or text."
    )
