"""Numbers that a script logs: kept on their device, reduced over ranks later, written by rank 0.

`log` costs a list append and, for a tensor on a device, one copy on that device; nothing waits for
it. At each consensus of the ranks (a few times a second) a batch of logged numbers moves on by one
stage:

    logged  →  copied from the device  →  names compared  →  reduced (`reduction`)  →  written

Ranks must log the same names for the same steps. If they do not (`if run.rank == 0: run.log(...)`),
rank 0's own numbers are written, and its log says so once. How fast the run trains
is always added up over all ranks, whoever logs. Sinks for each rank's own numbers (`own`) get them
before they are reduced.

Numbers of a step are averaged over its micro-steps, but not a learning rate: the last one is
written for the step.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline.contract.foreign_records import LineWriter
from paceline.contract.run_folder import ALONE
from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.metrics.reduction import Batch, Entry, Row
from paceline.runtime.metrics.throughput import Rates, ThroughputCounter

RESERVED = frozenset(
    ("step", "epoch", "time", "seconds", "samples_per_second", "stragglers", ALONE)
)  # what lines have anyway
MISMATCH = (
    "ranks log different names, or in different steps; writing rank 0's own numbers. Call run.log "
    "on all ranks, not under `if run.rank == 0`"
)
DEVICE_TIMEOUT = 2.0  # seconds that a failed rank waits for numbers from its device


class LineSink(Protocol):
    """Accepts whole lines of JSON: a file, or a tracker's thread."""

    def append(self, text: str) -> None: ...


class Metrics:
    """The metrics of a session. Every rank logs; rank 0 writes `metrics.jsonl`."""

    def __init__(
        self,
        lines: LineWriter,
        *,
        group: Any,
        rank: int,
        own: Sequence[LineSink] = (),
        rates: Rates | None = None,
    ) -> None:
        self.latest: dict[str, float] = {}
        self.latest_rates: dict[str, float] = {}  # how fast the run trains, as the newest line says
        self.throughput = ThroughputCounter(rates.device if rates else None)
        # a metric, each of whose values goes to `on_watched` with its step
        self.watched: str | None = None
        self.on_watched: Callable[[int, float], None] = lambda step, value: None
        self.lines = lines
        self._rates = rates or Rates()
        self._own = own
        self._group = group
        self._rank = rank
        self._entries: list[Entry] = []
        self._offered: Batch | None = None  # its schema is being compared
        # its numbers are on their way, from the device or from other ranks
        self._waiting: Batch | None = None
        self._warned_mismatch = False

    def log(self, step: int, epoch: int, weight: float, values: dict[str, Any]) -> None:
        if not RESERVED.isdisjoint(values):
            name = next(name for name in values if name in RESERVED)
            raise UsageError(
                f"run.log({name}=...): Paceline itself writes {name!r} to metrics.jsonl.",
                hint=f"Use another name, such as my_{name}.",
            )
        for name, given in values.items():
            kind = type(given)
            value = given
            # the common case, kept fast
            if kind is torch.Tensor and given.is_cpu and given.dim() == 0:
                values[name] = value = given.item()
                kind = type(value)
            if kind is not float and kind is not int:
                values[name] = value = given if kind is str else _scalar(name, value)
        self._entries.append((step, epoch, weight, time.time(), values))

    # -- captured steps ----------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self._entries)

    def take_since(self, mark: int) -> list[dict[str, Any]]:
        """Take back what was logged since `mark`."""
        taken, self._entries = self._entries[mark:], self._entries[:mark]
        return [entry[4] for entry in taken]

    def log_copies(self, step: int, epoch: int, weight: float, values: dict[str, Any]) -> None:
        """Log tensors that nothing else changes, under names that `log` has checked."""
        self._entries.append((step, epoch, weight, time.time(), values))

    # -- stages, one per consensus ---------------------------------------------------------------

    def offer(self) -> float:
        """Close the current batch, and return its schema for the consensus that is launched now."""
        assert self._offered is None
        processed = self.throughput.take() if self._entries else None
        self._offered = Batch(self._entries, alone=self._group is None, processed=processed)
        self._entries = []
        return float(self._offered.schema)

    def advance(self, *, same: bool = True) -> None:
        """After a consensus, write the previous batch and start reducing the offered one."""
        if self._waiting is not None:
            self._write(self._waiting)
            self._waiting = None
        batch, self._offered = self._offered, None
        if batch is None or (same and not batch.entries):
            return
        if not same and not self._warned_mismatch:
            self._warned_mismatch = True
            if self._rank == 0:
                note(MISMATCH)
        if batch.processed is None:  # other ranks have logged: the rates are those of all ranks
            batch.processed = self.throughput.take()
        if self._group is not None:
            self._fold(batch)
            batch.reduce(self._group, same_names=same)
        # waiting would leave the device without work
        if self._group is not None or batch.is_on_its_way:
            self._waiting = batch
        else:
            self._write(batch)

    def _fold(self, batch: Batch) -> None:
        batch.fold()
        if self._own and batch.rows:
            text = self._format(batch, batch.means())
            for sink in self._own:
                sink.append(text)

    def finish_alone(self) -> None:
        """After an error, write the numbers that this rank has, without the others."""
        waiting, offered, entries = self._waiting, self._offered, self._entries
        self._waiting, self._offered, self._entries = None, None, []
        if self._rank and not self._own:  # it writes nothing
            return
        try:
            for batch in (waiting, offered):
                self._write_alone(batch)
            self._write_alone(Batch(entries, alone=True))
        except RuntimeError:
            # the device itself has failed: its numbers are lost, but the first error must stay
            # visible
            pass

    def _write_alone(self, batch: Batch | None) -> None:
        if batch is not None and batch.arrives(within=DEVICE_TIMEOUT):
            batch.work, batch.ranks = None, 1
            self._write(batch, is_alone=True)

    def _write(self, batch: Batch, *, is_alone: bool = False) -> None:
        if batch.entries:
            self._fold(batch)
        batch.store_reduced()
        means = batch.means()
        for step, values in means.items():
            self.latest.update(values)
            if self.watched in values:
                self.on_watched(step, values[self.watched])
        if self._rank == 0 and means:
            is_share = is_alone and self._group is not None
            self.lines.append(self._format(batch, means, is_share=is_share))

    def _format(
        self, batch: Batch, means: dict[int, dict[str, float]], *, is_share: bool = False
    ) -> str:
        """Return the lines of a batch. They have the same rates: those of the steps since the last
        one. With `is_share`, they are rank 0's share, say so, and have no rates.
        """
        texts = {ALONE: MARK} if is_share else {}
        if batch.amounts is not None and not is_share:
            rates = self._rates.of(batch.amounts, batch.ranks)
            self.latest_rates = rates or self.latest_rates
            texts = {
                name: f', "{name}": {value:.6g}'
                for name, value in rates.items()
                if value - value == 0
            }
        return "".join([_line(step, row, means[step], texts) for step, row in batch.rows.items()])


def _scalar(name: str, value: Any) -> Any:
    """Return a copy: later changes in place (a CUDA graph's output, a running sum) must not affect
    it.
    """
    number = value
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            if not value.is_cpu:
                return value.detach().clone()
            number = value.item()
    elif hasattr(value, "item") and getattr(value, "size", 1) == 1:
        number = value.item()
    for kind in (bool, int, float, str):
        if isinstance(number, kind):  # also their subclasses, such as an IntEnum
            return int(number) if kind is bool else kind(number)
    shape = getattr(value, "shape", None)
    what = type(value).__name__ if not shape else f"{type(value).__name__} of shape {tuple(shape)}"
    raise UsageError(
        f"run.log({name}=...) got a {what}, but takes single numbers and text.",
        hint="Take the mean or the sum first, or log its items: run.log(**values).",
    )


MARK = f', "{ALONE}": "rank 0"'


def _line(step: int, row: Row, means: dict[str, float], rates: dict[str, str]) -> str:
    """Format one line by hand: at thousands of steps a second, `json.dumps` would be noticeable."""
    line = f'{{"step": {step}, "epoch": {row.epoch}, "time": {row.time:.6f}'
    # A number that the script itself logs under one of these names comes first.
    line += "".join([text for name, text in rates.items() if name not in means])
    for name, value in means.items():
        # NaN and infinities are not JSON, and every line must be valid.
        line += (
            f", {_quoted(name)}: {value}" if value - value == 0 else f', {_quoted(name)}: "{value}"'
        )
    for name, text in (row.texts or {}).items():
        line += f", {_quoted(name)}: {json.dumps(text)}"
    return line + "}\n"


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return json.dumps(name)
