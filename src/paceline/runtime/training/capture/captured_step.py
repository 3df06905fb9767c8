"""`run.capture(step)`: when a step runs eagerly, when it is captured, and which graph runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from paceline.contract import env
from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.training.capture.optimizers import GraphOptimizers
from paceline.runtime.training.capture.step_graph import Batch, Records, StepGraph, no_waits
from paceline.runtime.training.ddp import DDPModel
from paceline.runtime.training.fsdp import FSDPModel
from paceline.runtime.training.gradients import Gradients

# eager steps before the first capture: they create the state of optimizers, and compile
WARM_UP = 3
WARM_UP_DDP = 11  # DDP measures and regroups in its first steps
WARM_UP_NEXT = 2  # before each further capture
MAX_GRAPHS = 8  # per function; more shapes than that run eagerly

Key = tuple[Any, ...]


class CapturedStep:
    """A step function that runs as a CUDA graph where it can, and as it is where it cannot."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        gradients: Gradients,
        records: Records,
        log: Callable[[dict[str, Any]], None],
        rank: int,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.is_capturing = False
        self._function = function
        self._gradients = gradients
        self._wrapper = gradients.wrapper
        self._records = records
        self._log = log
        self._rank = rank
        self._device = gradients.device
        self.gave_up = ""  # why it always runs eagerly
        self._optimizers = GraphOptimizers(self._device)
        self._settings: list[Any] = []  # of the optimizers, when the graphs were captured
        self._warm: dict[Key, int] = {}  # eager steps so far
        self._graphs: dict[Key, StepGraph] = {}
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._stream is None and not self.gave_up:
            self._begin()
        if self.gave_up:
            return self._function(*args, **kwargs)
        batch = Batch.of(args, kwargs)
        key = self._key(batch)
        if key is None:
            return self._run_eagerly(args, kwargs)
        settings = self._optimizers.refresh()
        if settings != self._settings:
            self._settings = settings
            if self._graphs:  # which have the old settings as constants
                self._graphs.clear()
                self._warm.clear()
        graph = self._graphs.get(key)
        if graph is None:
            if self._warm.get(key, 0) < self._warm_up_steps:
                return self._warm_up(key, args, kwargs)
            graph = self._capture(key, batch)
            if graph is None:
                return self._run_eagerly(args, kwargs)
        if not graph.fits():  # an earlier micro-step of this step ran eagerly
            return self._run_eagerly(args, kwargs)
        if self._gradients.stragglers is not None:
            self._gradients.stragglers.mark_backward()
        return graph.replay(batch.leaves, self._log)

    def close(self) -> None:
        """Free the graphs, before the process group that they use."""
        self.gave_up = "the session has ended"
        self._graphs.clear()
        self._optimizers.close()

    # -- whether to capture
    # ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Prepare for the first step, or give up if all steps run eagerly."""
        reason = self._obstacle()
        if reason is not None:
            self._give_up(reason)
            return
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            for model in self._wrapper.models:
                if isinstance(model, DDPModel):
                    model.rebuild()  # what it records belongs to the stream of the capture

    def _obstacle(self) -> str | None:
        gradients = self._gradients
        if env.PROOF in os.environ:
            return "`paceline prove` records what happens in each of them"
        if self._device.type != "cuda":
            kind = self._device.type
            return (
                f"the device is {kind}, and CUDA graphs need a GPU; what they can't do is only "
                "checked there"
            )
        if gradients.scaler is not None:
            return "precision='fp16' decides on the host whether to step; bf16 does not"
        if gradients.skips_nonfinite:
            return "on_nonfinite='skip' decides on the host whether to step"
        if any(isinstance(model, FSDPModel) for model in self._wrapper.models):
            return "FSDP allocates memory in each step"
        return None

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self.gave_up = reason
        if self._rank == 0:
            note(f"run.capture: steps run eagerly, because {reason}")

    def _key(self, batch: Batch) -> Key | None:
        """Return what a graph depends on. None if there are values that no graph can hold."""
        values: list[Any] = []
        for leaf in batch.leaves:
            if isinstance(leaf, torch.Tensor):
                values.append((leaf.shape, leaf.dtype))
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                values.append((type(leaf), leaf))
            else:
                self._give_up(f"it gets a {type(leaf).__name__}; pass tensors and plain values")
                return None
        for model in self._wrapper.models:
            for module in model.model.modules():
                # the module itself: the script may replace it, and its id may be used again
                values += [module, module.training]
                values += [
                    each.requires_grad for each in module._parameters.values() if each is not None
                ]
        return (batch.structure, *values, self._gradients.micro_step(), torch.is_grad_enabled())

    @property
    def _warm_up_steps(self) -> int:
        if self._graphs:
            return WARM_UP_NEXT
        return (
            WARM_UP_DDP
            if any(isinstance(each, DDPModel) for each in self._wrapper.models)
            else WARM_UP
        )

    # -- run
    # -------------------------------------------------------------------------------------------

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        if self.gave_up:
            return self._function(*args, **kwargs)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._optimizers:
            result = self._function(*args, **kwargs)
        current.wait_stream(self._stream)
        return result

    def _warm_up(self, key: Key, args: Any, kwargs: Any) -> Any:
        self._warm[key] = count = self._warm.get(key, 0) + 1
        if len(self._warm) > 4 * MAX_GRAPHS:
            self._give_up(
                f"there are {len(self._warm)} different shapes or values of its arguments, or "
                "modes of modules"
            )
            return self._function(*args, **kwargs)
        if count < self._warm_up_steps:
            # the first steps may compile, and DDP regroups: both wait
            return self._run_eagerly(args, kwargs)
        with no_waits():
            return self._run_eagerly(args, kwargs)

    def _capture(self, key: Key, batch: Batch) -> StepGraph | None:
        """Capture the step, unless that is not possible. Nothing is computed yet."""
        if len(self._graphs) >= MAX_GRAPHS:
            return None
        reason = self._optimizers.unsupported() or self._gradients.capture_obstacle()
        if reason is not None:
            self._give_up(reason)
            return None
        if torch.is_autocast_enabled("cuda"):
            raise UsageError(
                "The step of run.capture is called under autocast.",
                hint="Use `with run.autocast():` inside the function.",
            )
        self.is_capturing = True
        try:
            with self._optimizers:
                graph = StepGraph(
                    self._function,
                    batch,
                    parameters=self._gradients.all_parameters(),
                    records=self._records,
                    end_step=self._gradients.end_captured_step,
                    device=self._device,
                    pool=self._pool,
                    stream=self._stream,
                )
        finally:
            self.is_capturing = False
        graph.restore_grads()
        if graph.keeps_grads and self._gradients.is_last_micro_step:
            self._give_up("it leaves gradients for a later step")
            return None
        self._graphs[key] = graph
        return graph
