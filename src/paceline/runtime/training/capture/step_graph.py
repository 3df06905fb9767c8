"""One CUDA graph of a step, for batches of one shape: what goes in, what comes out, and what it
logs.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

import paceline
from paceline.errors import UsageError
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.step_boundary.nonfinite import NonFiniteLossCheck

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(paceline.__file__).parent))


@dataclass(frozen=True)
class Batch:
    """The arguments of a step as a flat list, and what puts them together again."""

    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        # the common case, kept fast
        if not kwargs and all(type(each) is torch.Tensor for each in args):
            return cls(list(args), len(args))
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        return cls(leaves, structure)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.structure, int):
            return tuple(self.leaves), {}
        return _pytree.tree_unflatten(self.leaves, self.structure)  # type: ignore[no-any-return]


class Records:
    """Where losses and logged numbers go."""

    def __init__(self, metrics: Metrics, loss_check: NonFiniteLossCheck | None) -> None:
        self.metrics, self.loss_check = metrics, loss_check

    def mark(self) -> tuple[int, int]:
        return self.metrics.mark(), self.loss_check.mark() if self.loss_check is not None else 0

    def take(self, mark: tuple[int, int]) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        """Take back what was logged since, and the losses. Raises UsageError for numbers of the
        host.
        """
        logged = self.metrics.take_since(mark[0])
        losses = self.loss_check.take_since(mark[1]) if self.loss_check is not None else []
        for values in logged:
            for name, value in values.items():
                if not isinstance(value, torch.Tensor):
                    raise UsageError(
                        f"run.log({name}={value!r}) in the step of run.capture would log the same "
                        "value in every step.",
                        hint="Log it outside of the function, after the call.",
                    )
        return logged, losses


class StepGraph:
    """Kernels that were captured once, and run again for each batch."""

    def __init__(
        self,
        function: Callable[..., Any],
        batch: Batch,
        *,
        parameters: Sequence[nn.Parameter],
        records: Records,
        end_step: Callable[[], None],
        device: torch.device,
        pool: Any,
        stream: Any,
    ) -> None:
        self._parameters = parameters
        self._records = records
        self.grads_before = [parameter.grad for parameter in parameters]
        self._inputs = [_static(leaf, device) for leaf in batch.leaves]
        self._graph = torch.cuda.CUDAGraph()
        inputs = [
            each.detach() if isinstance(each, torch.Tensor) else each for each in self._inputs
        ]
        args, kwargs = Batch(inputs, batch.structure).arguments()
        mark = records.mark()
        try:
            with (
                _no_host_randomness(),
                torch.cuda.graph(
                    self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                result = function(*args, **kwargs)
                end_step()
                logged, losses = records.take(mark)
                self._names = [list(values) for values in logged]
                scalars = [value for values in logged for value in values.values()] + losses
                self._num_losses = len(losses)
                self._scalars = (
                    torch.stack([each.reshape(()).float() for each in scalars]) if scalars else None
                )
                leaves, self._structure = _pytree.tree_flatten(result)
                self._outputs = [
                    each.detach() if isinstance(each, torch.Tensor) else each for each in leaves
                ]
        except RuntimeError as error:
            records.take(mark)
            self.restore_grads()
            raise _capture_error(error) from error
        self.grads_after = [parameter.grad for parameter in parameters]

    def restore_grads(self) -> None:
        """Undo what a capture, which computes nothing, has done to the gradients."""
        for parameter, grad in zip(self._parameters, self.grads_before, strict=True):
            parameter.grad = grad

    @property
    def keeps_grads(self) -> bool:
        return any(grad is not None for grad in self.grads_after)

    def fits(self) -> bool:
        """Return whether the gradients are the tensors that this graph adds to."""
        return all(
            parameter.grad is grad
            for parameter, grad in zip(self._parameters, self.grads_before, strict=True)
        )

    def replay(self, leaves: list[Any], log: Callable[[dict[str, Any]], None]) -> Any:
        """Run the step on a batch. Returns copies of what the function returned: the next replay
        overwrites it.
        """
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(static, torch.Tensor):
                static.copy_(leaf, non_blocking=True)
        self._graph.replay()
        if self._scalars is not None:
            self._record(list(self._scalars.clone().unbind()), log)
        for parameter, grad in zip(self._parameters, self.grads_after, strict=True):
            parameter.grad = grad
        if not self._outputs:
            return None
        copies = [
            each.clone() if isinstance(each, torch.Tensor) else each for each in self._outputs
        ]
        return _pytree.tree_unflatten(copies, self._structure)

    def _record(self, scalars: list[torch.Tensor], log: Callable[[dict[str, Any]], None]) -> None:
        if self._num_losses:
            assert self._records.loss_check is not None
            for loss in scalars[-self._num_losses :]:
                self._records.loss_check.record_copy(loss)
        copies = iter(scalars)
        for names in self._names:
            log({name: next(copies) for name in names})


def _static(leaf: Any, device: torch.device) -> Any:
    """Return the tensor that all batches are copied to; other values are constants of the graph."""
    return (
        torch.empty_like(leaf, device=device).copy_(leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf
    )


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise UsageError, with the script's line, where the body waits for the device. A capture
    that fails leaves torch's generators unusable, so this looks before.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise _wait_error(error.__traceback__) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _wait_error(trace: TracebackType | None) -> UsageError:
    return UsageError(
        f"The step of run.capture waits for the device{_script_line(trace)}.",
        hint="Move it out of the function that you pass to run.capture, or leave it on the "
        "device: run.log(loss=loss) takes tensors, and torch.where replaces an `if`.",
    )


@contextlib.contextmanager
def _no_host_randomness() -> Iterator[None]:
    """Raise UsageError if the body draws random numbers on the host: they would be the same in
    every step.
    """
    before = _generator_states()
    yield
    for name, state in _generator_states().items():
        if before.get(name, state) != state:
            raise UsageError(
                f"The step of run.capture draws random numbers from {name}, which would be the "
                "same in every step.",
                hint="Draw them on the device, as in torch.rand(n, device=run.device), or outside "
                "of the function.",
            )


def _generator_states() -> dict[str, Any]:
    states = {
        "Python's random": random.getstate(),
        "torch on the CPU": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["NumPy"] = repr(numpy.random.get_state(legacy=True))
    return states


def _capture_error(error: RuntimeError) -> Exception:
    """Say in which line a capture failed. Torch reports the end of a failed capture, with the
    cause as its context.
    """
    cause: BaseException = error
    while cause.__context__ is not None and isinstance(cause.__context__, RuntimeError):
        cause = cause.__context__
    if isinstance(cause, UsageError):
        return cause
    if "captur" in str(cause):
        return _wait_error(cause.__traceback__)
    return UsageError(
        f"The step of run.capture cannot be captured{_script_line(cause.__traceback__)}: {cause}",
        hint="Call the function itself instead of run.capture(function).",
    )


def _script_line(trace: TracebackType | None) -> str:
    """Return where the innermost line of a traceback is that is not torch's or ours."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            text = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" at {frame.filename}:{frame.lineno}: {text}"
    return ""
