"""A function of the script that turns rows of resident tensors into a batch, such as crops, flips
and normalization.

It works on whole batches on the device. On CUDA, the gather and the function run as one CUDA graph.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.data.transfer import map_tensors
from paceline.runtime.randomness import derive_seed, host_state

WARM_UP = 3  # calls before the capture, in which kernels may compile

# The multipliers of splitmix64, as signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class SampleRandom:
    """Uniform random numbers that depend on the seed, the epoch and the sample alone: `random(2)`
    has shape (batch, 2).

    So a sample gets the same numbers on any number of ranks and after a resume, on the CPU as on a
    GPU.
    """

    def __init__(self, rows: torch.Tensor, key: torch.Tensor) -> None:
        self._samples = _mix(rows * _GOLDEN + key)
        self._drawn = 0

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return numbers in [0, 1) of shape (batch, *shape), other ones with each call."""
        count = math.prod(shape)
        numbers = torch.arange(
            self._drawn + 1, self._drawn + count + 1, device=self._samples.device
        )
        self._drawn += count
        mixed = _mix(self._samples[:, None] + numbers * _GOLDEN)
        return (((mixed >> 40) & 0xFFFFFF).float() * 2.0**-24).view(-1, *shape)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of 64-bit numbers. Shifts of signed numbers need a mask."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))


class BatchTransform:
    """Gathers rows of tensors, and applies the function to them."""

    def __init__(
        self, function: Callable[..., Any], tensors: Any, *, seed: int, device: torch.device
    ) -> None:
        self._function, self._tensors, self._seed = function, tensors, seed
        # a tensor, since the graph reads it
        self._key = torch.zeros((), dtype=torch.int64, device=device)
        self._wants_random = _takes_random(function)
        self._calls = 0
        self._graph: _Graph | None = None
        self._can_capture = device.type == "cuda"

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def begin(self, epoch: int) -> None:
        """Use the random numbers of an epoch from now on."""
        key = derive_seed(self._seed, epoch)
        self._key.fill_(key - (1 << 64) if key >= 1 << 63 else key)

    def __call__(self, rows: torch.Tensor) -> Any:
        """Return the batch that consists of these rows."""
        if self._graph is not None and len(rows) == len(self._graph.rows):
            return self._graph.replay(rows)
        self._calls += 1
        if not self._can_capture or self._graph is not None or self._calls <= WARM_UP:
            return self._checked(rows)
        if self._waits(rows):  # a capture that fails leaves torch's generator unusable: look before
            self._can_capture = False
            note(
                "run.loader: the transform runs eagerly, because it waits for the device, as "
                ".item() does"
            )
            return self._checked(rows)
        self._graph = _Graph(self._compute, rows)
        return self._graph.replay(rows)

    def _compute(self, rows: torch.Tensor) -> Any:
        batch = map_tensors(self._tensors, partial(torch.index_select, dim=0, index=rows))
        fields = (batch,) if isinstance(batch, Mapping) else batch
        if self._wants_random:
            return self._function(*fields, random=SampleRandom(rows, self._key))
        return self._function(*fields)

    def _checked(self, rows: torch.Tensor) -> Any:
        """Compute a batch, and look at what the function does: a graph would repeat its first
        random numbers.
        """
        before = self._random_state()
        batch = self._compute(rows)
        if batch is None:
            raise UsageError(
                "The transform of run.loader returns nothing.", hint="Let it return the new batch."
            )
        if self._random_state() != before:
            raise UsageError(
                "The transform of run.loader uses random numbers of Python, NumPy or torch: they "
                "differ between ranks.",
                hint="Give it a parameter `random`: random(2) returns two numbers in [0, 1) for "
                "each sample.",
            )
        return batch

    def _random_state(self) -> tuple[Any, ...]:
        """Return the states of all global generators that the function could use, without waiting
        for the device.
        """
        if self._key.device.type != "cuda":
            return host_state()
        return (*host_state(), torch.cuda.get_rng_state(self._key.device).numpy().tobytes())

    def _waits(self, rows: torch.Tensor) -> bool:
        """Return whether the function makes the host wait for the device."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._compute(rows)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False


class _Graph:
    """The gather and the function as kernels that run again for other rows."""

    def __init__(self, compute: Callable[[torch.Tensor], Any], rows: torch.Tensor) -> None:
        self.rows = rows.clone()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._batch = compute(self.rows)
        except RuntimeError as error:
            raise UsageError(
                "The transform of run.loader cannot run as a CUDA graph: "
                f"{str(error).splitlines()[0]}",
                hint="Apply the function in your loop instead.",
            ) from error

    def replay(self, rows: torch.Tensor) -> Any:
        """Return the batch of these rows: a copy, since the script may keep it."""
        self.rows.copy_(rows)
        self._graph.replay()
        return map_tensors(self._batch, torch.clone)


def _takes_random(function: Callable[..., Any]) -> bool:
    try:
        return "random" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        return False
