"""Numbers that a script logs: kept on their device, reduced over ranks later, written by rank 0.

`log` costs a list append and, for a tensor on a device, one copy on that device; nothing waits for it. At each
consensus of the ranks (a few times a second) a batch of logged numbers moves on by one stage:

    logged  →  copied from the device  →  names compared  →  reduced  →  written

Ranks must log the same names for the same steps. If they do not (`if run.rank == 0: run.log(...)`), rank 0's own
numbers are written, and its log says once which names differ. Text on one rank and a number on another is an error.
Sinks for each rank's own numbers (`own`) get them before they are reduced.

Numbers of a step are averaged over its micro-steps, but not a learning rate: the last one stands for the step.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.contract.jsonl import LineWriter
from paceline.errors import UsageError
from paceline.runtime.console import format_ranks, note

# One call of `log`: step, epoch, samples of the step, weight of these values, time, the values.
Entry = tuple[int, int, int, float, float, dict[str, Any]]
RESERVED = frozenset(("step", "epoch", "time", "seconds", "samples_per_second", "stragglers"))  # what lines have anyway
LEARNING_RATE = re.compile(r"(.*/)?(lr|learning_rate)([_-]?\d+|/.*)?", re.IGNORECASE)
DEVICE_TIMEOUT = 2.0  # seconds that a failed rank waits for numbers from its device


class LineSink(Protocol):
    """Accepts whole lines of JSON: a file, or a tracker's thread."""

    def append(self, text: str) -> None: ...


LARGEST = int(sys.float_info.max)


class PendingScalars:
    """Scalars being copied from a device to the host, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._event: Any = None
        stacked = torch.stack([tensor.reshape(()).to(dtype) for tensor in tensors])
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

    def arrives(self, *, within: float) -> bool:
        """Return whether the values arrive in time. A device may hang in a collective that peers never answer."""
        deadline = time.monotonic() + within
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class _Row:
    """What one step logged: sums of value x weight, sums of weights, and text."""

    __slots__ = ("epoch", "samples", "sums", "texts", "time", "weights")

    def __init__(self, epoch: int, samples: int) -> None:
        self.epoch, self.samples = epoch, samples
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
        return {name: total / weights[name] if weights[name] else math.nan for name, total in self.sums.items()}


class _Batch:
    """Rows that are reduced together."""

    def __init__(self, entries: list[Entry], *, alone: bool, has_text: bool = False) -> None:
        self.entries = entries
        tensors = [value for entry in entries for value in entry[5].values() if isinstance(value, torch.Tensor)]
        self._pending = PendingScalars(tensors) if tensors else None
        self.rows: dict[int, _Row] = {}
        self._reduced = torch.empty(0)
        self.work: Any = None
        self.ranks_without_samples = 0  # ranks with NaN after an evaluation that gave them an empty batch
        # A hash of steps, names and kinds, which all ranks must share for their numbers to be reduced; and one of the
        # names that have text.
        self.schema = self.text_schema = 0
        if not alone:
            names = [f"{entry[0]} {' '.join(entry[5])}" for entry in entries]
            if has_text:
                texts = [" ".join(name for name in entry[5] if type(entry[5][name]) is str) for entry in entries]
                names += texts
                self.text_schema = zlib.crc32(" ".join(sorted({*" ".join(texts).split()})).encode())
            self.schema = zlib.crc32("\n".join(names).encode()) * 65536 + len(entries) % 65536

    def kinds(self) -> dict[str, set[str]]:
        """Return what was logged under each name: "text", "a number", or both."""
        found: dict[str, set[str]] = {}
        for entry in self.entries:
            for name, value in entry[5].items():
                found.setdefault(name, set()).add("text" if type(value) is str else "a number")
        return found

    def arrives(self, *, within: float) -> bool:
        return self._pending is None or self._pending.arrives(within=within)

    def fold(self) -> None:
        """Turn entries into rows, once the numbers have arrived from the device."""
        arrived = iter(self._pending.values() if self._pending else ())
        rows = self.rows
        for step, epoch, samples, weight, when, values in self.entries:
            row = rows.get(step)
            if row is None:
                row = rows[step] = _Row(epoch, samples)
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

    def reduce(self, group: Any) -> None:
        flat = [number for row in self.rows.values() for number in (*row.sums.values(), *row.weights.values())]
        if flat:
            flat.append(self.ranks_without_samples)
            self._reduced = torch.tensor(flat, dtype=torch.float64)
            self.work = dist.all_reduce(self._reduced, group=group, async_op=True)

    def store_reduced(self) -> None:
        """Put the reduced numbers into their rows."""
        if self.work is None:
            return
        self.work.wait()
        numbers = iter(self._reduced.tolist())
        for row in self.rows.values():
            row.sums = {name: next(numbers) for name in row.sums}
            row.weights = {name: next(numbers) for name in row.weights}
        self.ranks_without_samples = int(next(numbers))

    def find_nan(self, steps: Container[int] | None = None) -> tuple[int, str] | None:
        """Return the first step and name with NaN, of these steps if given."""
        for step, row in self.rows.items():
            if steps is None or step in steps:
                for name, total in row.sums.items():
                    if math.isnan(total):
                        return step, name
        return None

    def means(self) -> dict[int, dict[str, float]]:
        """Return the means of each step."""
        return {step: row.means() for step, row in self.rows.items()}


class Metrics:
    """The metrics of a session. Every rank logs; rank 0 writes `metrics.jsonl`."""

    def __init__(self, lines: LineWriter, *, group: Any, rank: int, own: Sequence[LineSink] = ()) -> None:
        self.latest: dict[str, float] = {}
        self.watched: str | None = None  # a metric, each of whose values goes to `on_watched` with its step
        self.on_watched: Callable[[int, float], None] = lambda step, value: None
        self._format = _LineFormatter()
        self._own = own
        self._own_format = _LineFormatter()
        self._lines = lines
        self._group = group
        self._rank = rank
        self._entries: list[Entry] = []
        self._has_text = False
        self._offered: _Batch | None = None  # its schema is being compared
        self._reducing: _Batch | None = None
        self._warned_mismatch = False
        self._empty_steps: set[int] = set()  # whose evaluation gave this rank an empty batch
        self._explained_nan = False

    def note_empty_evaluation(self, step: int) -> None:
        """Remember that an evaluation after this step gave this rank an empty batch: a mean over it is NaN."""
        self._empty_steps |= {step, step + 1}  # whether it is logged after the step, or inside the next one

    def log(self, step: int, epoch: int, samples: int, weight: float, values: dict[str, Any]) -> None:
        if not RESERVED.isdisjoint(values):
            raise _reserved_name(values)
        for name, given in values.items():
            kind = type(given)
            value = given
            if kind is torch.Tensor and given.is_cpu and given.dim() == 0:  # the common case, kept fast
                values[name] = value = given.item()
                kind = type(value)
            if kind is not float and kind is not int:
                values[name] = value = given if kind is str else _scalar(name, value)
                self._has_text |= type(value) is str
            elif kind is int and not -LARGEST <= value <= LARGEST:
                raise _too_large(name)
        self._entries.append((step, epoch, samples, weight, time.time(), values))

    # -- captured steps ----------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self._entries)

    def take_since(self, mark: int) -> list[dict[str, Any]]:
        """Take back what was logged since `mark`."""
        taken, self._entries = self._entries[mark:], self._entries[:mark]
        return [entry[5] for entry in taken]

    def log_copies(self, step: int, epoch: int, samples: int, weight: float, values: dict[str, Any]) -> None:
        """Log tensors that nothing else changes, under names that `log` has checked."""
        self._entries.append((step, epoch, samples, weight, time.time(), values))

    # -- stages, one per consensus ---------------------------------------------------------------

    def offer(self) -> tuple[float, float]:
        """Close the current batch, and return its schemas for the consensus that is launched now."""
        assert self._offered is None
        self._offered = _Batch(self._entries, alone=self._group is None, has_text=self._has_text)
        self._entries, self._has_text = [], False
        return float(self._offered.schema), float(self._offered.text_schema)

    def advance(self, *, same: bool = True, same_texts: bool = True) -> None:
        """After a consensus, write the previous batch and start reducing the offered one.

        Raises UsageError if a name has text on one rank and a number on another.
        """
        if self._reducing is not None:
            self._write(self._reducing)
            self._reducing = None
        batch, self._offered = self._offered, None
        if batch is not None and not (same_texts and (same or self._warned_mismatch)):
            self._compare_names(batch)
        if batch is None or not batch.entries:
            return
        batch.fold()
        if self._empty_steps:
            batch.ranks_without_samples = int(batch.find_nan(self._empty_steps) is not None)
        self._write_own(batch)
        if same and self._group is not None:
            batch.reduce(self._group)
            self._reducing = batch
            return
        self._write(batch)

    def _compare_names(self, batch: _Batch) -> None:
        """Find out what differs. Waits for all ranks: they all know that something does."""
        kinds: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(kinds, batch.kinds(), group=self._group)
        difference = describe_difference(kinds)
        if not self._warned_mismatch and self._rank == 0:
            note(f"ranks log different {difference}; writing rank 0's own numbers")
        self._warned_mismatch = True

    def finish_alone(self) -> None:
        """After an error, write the numbers that this rank has, without the others."""
        reducing, offered, entries = self._reducing, self._offered, self._entries
        self._reducing, self._offered, self._entries = None, None, []
        if self._rank and not self._own:
            return
        try:
            if reducing is not None:
                reducing.work = None
                self._write(reducing)
            for batch in (offered, _Batch(entries, alone=True)):
                if batch is not None and batch.entries and batch.arrives(within=DEVICE_TIMEOUT):
                    batch.fold()
                    self._write_own(batch)
                    self._write(batch)
        except RuntimeError:
            pass  # the device itself has failed: its numbers are lost, but the first error must stay visible

    def _write(self, batch: _Batch) -> None:
        batch.store_reduced()
        means = batch.means()
        for step, values in means.items():
            self.latest.update(values)
            if self.watched in values:
                self.on_watched(step, values[self.watched])
        if self._rank == 0 and means:
            self._lines.append(self._format.lines(batch.rows, means))
            if batch.ranks_without_samples and not self._explained_nan:
                self._explain_nan(batch)

    def _explain_nan(self, batch: _Batch) -> None:
        step, name = batch.find_nan() or (0, "")
        size = dist.get_world_size(self._group) if self._group is not None else 1
        note(
            f"{name} is nan at step {step}: in the evaluation, {batch.ranks_without_samples} of {size} ranks had a "
            "batch without samples, and the mean over no samples is nan. Add up sums and counts, or use "
            "run.mean(loss, weight=samples)"
        )
        self._explained_nan = True

    def _write_own(self, batch: _Batch) -> None:
        if self._own:
            text = self._own_format.lines(batch.rows, batch.means())
            for sink in self._own:
                sink.append(text)


class _LineFormatter:
    """Writes rows as lines of JSON. Remembers the previous row, for the time per step."""

    def __init__(self) -> None:
        self._previous: tuple[int, float] | None = None

    def lines(self, rows: dict[int, _Row], means: dict[int, dict[str, float]]) -> str:
        return "".join([self._line(step, row, means[step]) for step, row in rows.items()])

    def _line(self, step: int, row: _Row, means: dict[str, float]) -> str:
        """Format one line by hand: at thousands of steps a second, `json.dumps` would be noticeable."""
        line = f'{{"step": {step}, "epoch": {row.epoch}, "time": {row.time:.6f}'
        previous = self._previous
        if previous is None or step > previous[0]:
            self._previous = (step, row.time)
            if previous is not None:
                seconds = (row.time - previous[1]) / (step - previous[0])
                line += f', "seconds": {seconds:.6f}'
                if row.samples and seconds > 0:
                    line += f', "samples_per_second": {row.samples / seconds:.1f}'
        for name, value in means.items():
            # NaN and infinities are not JSON, and every line must be valid.
            line += f", {_quoted(name)}: {value}" if value - value == 0 else f', {_quoted(name)}: "{value}"'
        for name, text in (row.texts or {}).items():
            line += f", {_quoted(name)}: {json.dumps(text)}"
        return line + "}\n"


@functools.lru_cache(maxsize=1024)
def _is_learning_rate(name: str) -> bool:
    return LEARNING_RATE.fullmatch(name) is not None


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return json.dumps(name)


def describe_difference(kinds: list[dict[str, set[str]]]) -> str:
    """Describe how the names of the ranks differ. Raises UsageError for text on one rank and a number on another."""
    names = dict.fromkeys(name for each in kinds for name in each)
    for name in names:
        found = {rank: " and ".join(sorted(each[name])) for rank, each in enumerate(kinds) if name in each}
        first = min(found)
        for rank, kind in found.items():
            if kind != found[first]:
                raise UsageError(
                    f"run.log({name}=...) got {found[first]} on rank {first}, but {kind} on rank {rank}.",
                    hint="Log the same kind of value on all ranks.",
                )
    for name in names:
        found_on = [rank for rank, each in enumerate(kinds) if name in each]
        if len(found_on) < len(kinds):
            return f"names ({name!r} only on {format_ranks(found_on)})"
    return "steps"


def _reserved_name(values: dict[str, Any]) -> UsageError:
    name = next(name for name in values if name in RESERVED)
    return UsageError(
        f"run.log({name}=...): Paceline itself writes {name!r} to metrics.jsonl.",
        hint=f"Use another name, such as my_{name}.",
    )


def _too_large(name: str) -> UsageError:
    return UsageError(f"run.log({name}=...) got an integer that no float can hold.", hint="Log its logarithm, or text.")


def _scalar(name: str, value: Any) -> Any:
    """Return a copy: later changes in place (a CUDA graph's output, a running sum) must not affect it."""
    what, hint = f"a {type(value).__name__}", "Log numbers, tensors of one element, or text."
    number: Any = None
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor and hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if value.numel() != 1:
            what, hint = f"a tensor of shape {tuple(value.shape)}", "Take the mean or the sum first."
        elif value.is_complex() or value.is_meta:
            what = f"a tensor of {value.dtype} on {value.device}"
        else:
            number = value.item() if value.is_cpu else value.detach().clone()
    elif getattr(value, "shape", ()) and getattr(value, "size", 1) != 1:
        what, hint = f"a {type(value).__name__} of shape {tuple(value.shape)}", "Take the mean or the sum first."
    elif hasattr(value, "item"):
        number = value.item()
    elif isinstance(value, (int, float, str)):
        number = value
    elif isinstance(value, dict):
        hint = "Log its items: run.log(**values)."
    elif value is None:
        what, hint = "None", "Leave it out until there is a value."
    for kind in (bool, int, float, str):
        if isinstance(number, kind):  # also their subclasses, such as an IntEnum
            if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
                raise _too_large(name)
            return int(number) if kind is bool else kind(number)
    if isinstance(number, torch.Tensor):
        return number
    raise UsageError(f"run.log({name}=...) got {what}, but takes single numbers and text.", hint=hint)
