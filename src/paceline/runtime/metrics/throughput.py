"""How fast a run trains: samples and tokens per second, time spent waiting for data, and model
FLOPs utilization.

Each rank counts what it processes. The counts are added up with the logged numbers, a few times a
second, so nothing waits for the device. If only some ranks log, the counts of all are added up just
the same. Evaluations between two loops don't count as training.

MFU is the share of the devices' peak that the model itself needs: FLOPs of the forward and the
backward pass, without those of recomputed activations, over time x ranks x peak of dense matrix
products in the run's precision.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

# Peaks of dense matrix products in TFLOP/s, without sparsity, by a word of the name that CUDA gives
# the device.
PEAKS: dict[str, dict[str, float]] = {
    "GB200": {"16": 2500.0, "tf32": 1250.0, "fp32": 80.0},
    "B200": {"16": 2250.0, "tf32": 1125.0, "fp32": 75.0},
    "GH200": {"16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200": {"16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 PCIe": {"16": 756.0, "tf32": 378.0, "fp32": 51.2},
    "H100 NVL": {"16": 835.0, "tf32": 417.5, "fp32": 60.0},
    "H100": {"16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "A40": {"16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "A30": {"16": 165.0, "tf32": 82.0, "fp32": 10.3},
    "A10G": {"16": 70.0, "tf32": 35.0, "fp32": 31.5},
    "A10": {"16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "L40S": {"16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "L40": {"16": 181.0, "tf32": 90.5, "fp32": 90.5},
    "L4": {"16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "V100-PCIE": {"16": 112.0, "fp32": 14.0},
    "V100": {"16": 125.0, "fp32": 15.7},
    "T4": {"16": 65.0, "fp32": 8.1},
}


class Amounts(NamedTuple):
    """What was processed in a while: by one rank, or in sum by all of them. Seconds and steps,
    too, are summed.
    """

    seconds: float
    waited: float  # seconds of them in which the loop waited for data
    steps: float
    samples: float
    tokens: float
    flops: float


class _Moment:
    """A point in time, on the host and, if there is one, on the GPU, which may be many steps
    behind.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.host = time.perf_counter()
        self.event: Any = None
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # the device has failed: that error is on its way, and must stay visible
            with suppress(RuntimeError):
                event.record()
                self.event = event

    def seconds_until(self, later: _Moment) -> float:
        """Return the seconds on the GPU, or on the host if the GPU is not there yet."""
        if self.event is not None and later.event is not None and later.event.query():
            return float(self.event.elapsed_time(later.event)) / 1000
        return later.host - self.host


class ThroughputCounter:
    """Counts on one rank. The loop adds to the public attributes."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited = 0.0  # seconds
        self._waited_before = 0.0  # seconds, until the last `take`
        self.steps = self.samples = 0
        self._more_samples = self._tokens = self._flops = 0.0  # from the script
        self._on_gpu = device is not None and device.type == "cuda"
        # None outside of training loops, whose time doesn't count
        self._began: _Moment | None = None
        self._spans: list[tuple[_Moment, _Moment]] = []

    def begin_loop(self) -> None:
        self._began = _Moment(on_gpu=self._on_gpu)

    def end_loop(self) -> None:
        if self._began is not None:
            self._spans.append((self._began, _Moment(on_gpu=self._on_gpu)))
            self._began = None

    def add(self, samples: float, tokens: float, flops: float) -> None:
        self._more_samples += samples
        self._tokens += tokens
        self._flops += flops

    @property
    def waited_in_all(self) -> float:
        """The seconds that the loop has waited for data since its first step."""
        return self._waited_before + self.waited

    def take(self) -> Callable[[], Amounts]:
        """Start anew, and return a function that tells what was processed since the last call: how
        long that took may be known only later.
        """
        if self._began is not None:
            self.end_loop()
            self._began = self._spans[-1][1]
        spans, self._spans = self._spans, []
        samples = self._more_samples or self.samples
        counts = self.waited, self.steps, samples, self._tokens, self._flops

        def amounts() -> Amounts:
            return Amounts(sum(begin.seconds_until(end) for begin, end in spans), *counts)

        self._waited_before += self.waited
        self.waited = self._more_samples = self._tokens = self._flops = 0.0
        self.steps = self.samples = 0
        return amounts


class Rates:
    """Turns the amounts of all ranks into the numbers that people read."""

    def __init__(
        self,
        *,
        find_peak: Callable[[], float | None] = lambda: None,
        find_copies: Callable[[], int] = lambda: 1,
        device: torch.device | None = None,
    ) -> None:
        # FLOP/s of one device; None if unknown. Called when the script has set all up
        self.find_peak = find_peak
        self.find_copies = find_copies  # how many ranks have the same samples, which count once
        self.device = device

    def of(self, amounts: Amounts, ranks: int) -> dict[str, float]:
        """Return the rates of what so many ranks have processed together: one rank, or all of
        them.
        """
        if amounts.seconds <= 0 or not amounts.steps:
            return {}
        seconds = amounts.seconds / ranks
        rates = {
            "seconds": amounts.seconds / amounts.steps,
            "data_wait": min(1.0, amounts.waited / amounts.seconds),
        }
        copies = self.find_copies() if ranks > 1 else 1
        amounts = Amounts(*amounts[:3], *(amount / copies for amount in amounts[3:]))
        if amounts.samples:
            rates["samples_per_second"] = amounts.samples / seconds
        if amounts.tokens:
            rates["tokens_per_second"] = amounts.tokens / seconds
        if amounts.flops:
            rates["tflops_per_second"] = amounts.flops / seconds / 1e12
            if self._peak is not None:
                rates["mfu"] = amounts.flops / seconds / (self._peak * ranks)
        if self.device is not None and self.device.type == "cuda":
            # GB, of this rank's tensors on its GPU at most
            rates["peak_memory"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return rates

    @functools.cached_property
    def _peak(self) -> float | None:
        return self.find_peak()


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the peak FLOP/s of a device for matrix products in a precision; None if it is not in
    the table.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next(
        (peaks for words, peaks in PEAKS.items() if re.search(rf"\b{words}\b", name)), None
    )
    if peaks is None:
        return None
    if dtype in (torch.float16, torch.bfloat16):
        return peaks["16"] * 1e12
    uses_tf32 = torch.get_float32_matmul_precision() != "highest" and "tf32" in peaks
    return peaks["tf32" if uses_tf32 else "fp32"] * 1e12
