"""What a rank records for `paceline prove`: samples, losses, gradients and final weights, step by
step.

It sees every script through torch itself: calls of modules, backward passes, steps of optimizers,
and data loaders. So it needs neither a session nor a change of the script. Nothing of this is
imported unless PACELINE_PROOF is set.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.contract.foreign_records import LineWriter
from paceline.contract.rank_records import (
    BATCHNORM,
    DRAWS,
    DROPOUT,
    END,
    OTHER_DRAWS,
    START,
    STEP,
    ProofSpec,
    record_path,
)
from paceline.errors import RunError
from paceline.runtime.lr_scale import effective_rate
from paceline.runtime.proof.calls import Call, Column, PendingCalls, tensors_of
from paceline.runtime.proof.weights import (
    compare,
    digest_modules,
    full_tensors,
    gradient_summary,
    measure_distance,
    weights_digest,
    write,
)
from paceline.runtime.randomness import seed_everything

MAX_DIGESTED = 2**24  # elements of weights whose digest is recorded in each step
OTHER_SEED = 987_654_321  # of other random numbers for the script to draw
STOP_DELAY = 0.1  # seconds per step while a stop is due: ranks agree on it every 0.4 seconds


class Recorder:
    """The records of this process, which is one rank."""

    def __init__(self, spec: ProofSpec, *, rank: int, world_size: int) -> None:
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.depth = 0  # of module calls
        self.loop: Any = None  # the loop of the session, if the script uses the runtime
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._lines = LineWriter(record_path(Path(spec.folder), rank))
        self._optimizers: list[torch.optim.Optimizer] = []
        self._models: list[nn.Module] = []
        # weights before the first step, on rank 0
        self._initial: dict[int, torch.Tensor | None] = {}
        self._pending = PendingCalls()
        self._counted = 0  # steps, if no session counts them
        self._steps_here = 0  # steps of this process
        self._has_gradient = False  # whether a summary of gradients that are not zero is recorded
        self._is_ended = False
        self._rates: list[float] = []  # learning rates of this step
        self._autocast = ""
        self._seen: set[str] = set()  # what the script does that may depend on the rank
        self._clear()

    @property
    def is_here(self) -> bool:
        """Whether this is the rank itself, and not a worker of a data loader or another thread."""
        return os.getpid() == self._pid and threading.get_ident() == self._thread

    def attach(self, run: Any) -> None:
        """Count steps as a session does."""
        self.loop = run._loop

    def end_at_exit(self) -> None:
        """End the records of a script that has trained fewer steps. Shards can no longer be
        gathered then.
        """
        if self.is_here and not any(
            hasattr(each, "full_tensor") for each in _parameters(self._optimizers)
        ):
            self.end()

    def _clear(self) -> None:
        self._samples: list[Any] | None = []  # None if one of them is not known
        self._contents: list[list[Column]] | None = []
        self._rows = 0
        self._losses: list[float] = []
        self._backwards = 0
        self._clip: dict[str, float] | None = None

    # -- what the patches of torch report
    # --------------------------------------------------------------

    def note_use(self, what: str) -> None:
        """Note that the model uses dropout, or BatchNorm, in training mode."""
        if self.is_here:
            self._seen.add(what)

    def note_batch(self, loader: int, indices: list[Any]) -> None:
        self._pending.add_batch(loader, indices)

    def note_call(self, module: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """Note the inputs of a module that the script calls, perhaps for a loss."""
        if not torch.is_grad_enabled():
            self._pending.drop_batches()  # an evaluation
            return None
        micro = None if self.loop is None else self.loop.micro
        if self.loop is not None and self.loop.entered and micro is None:
            return None
        if OTHER_DRAWS in self.spec.changes:
            seed_everything(OTHER_SEED + self._counted * self.world_size + self.rank)
        is_filler = micro is not None and micro.count == 0
        call = self._pending.add((args, kwargs), is_training=module.training, is_filler=is_filler)
        if not any(each is module for each in self._models):
            self._models.append(module)
            self._see_uses(module)
        device = next((each.device.type for each in tensors_of((args, kwargs))), "cpu")
        if torch.is_autocast_enabled(device):
            self._autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return call

    def note_loss(self, loss: torch.Tensor, state: list[Any]) -> None:
        """Note a loss after its backward pass, and the samples that it comes from. `state` is that
        before the pass.
        """
        self._backwards += 1
        if loss.numel() == 1:
            self._losses.append(float(loss.detach()))
        call = self._pending.take_trained_call()
        if call is not None and call.state != state:
            self._seen.add(DRAWS)
        if call is not None and call.is_filler:
            return
        rows = 0 if call is None else call.rows
        contents = None if call is None or len(call.contents) != rows or not rows else call.contents
        indices = None if call is None else call.indices
        self._rows += rows
        self._samples = (
            None if self._samples is None or indices is None else self._samples + indices
        )
        self._contents = (
            None if self._contents is None or contents is None else self._contents + contents
        )

    def note_clip(self, size: Any, limit: float) -> None:
        """Note the size of the gradients before they are clipped, and the limit."""
        if self._clip is None and self.is_here:
            size = size.full_tensor() if hasattr(size, "full_tensor") else size
            self._clip = {"size": float(size), "limit": float(limit)}

    # -- steps
    # -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_here:
            return
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
            self._keep_initial(optimizer)
        if optimizer is not self._optimizers[0]:
            return
        if self.loop is None and self._counted >= self.spec.steps:
            self.end()
            raise SystemExit(0)
        if not self._steps_here:
            self._write_start(optimizer)
        self._rates = [
            effective_rate(optimizer, float(group["lr"])) for group in optimizer.param_groups
        ]

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_here:
            return
        if optimizer is self._optimizers[0]:
            self._counted += 1
            self._steps_here += 1
            self._write_step(optimizer)
            self._stop_when_due()
        if self.step >= self.spec.steps:
            self.end(is_last=optimizer is self._optimizers[-1])

    @property
    def step(self) -> int:
        """The step that the optimizer has just done, from 1."""
        return self._counted if self.loop is None else int(self.loop.current)

    def _stop_when_due(self) -> None:
        """Ask for a stop, as a scheduler would. Steps that take a while let the ranks agree before
        the last one.
        """
        if not self.spec.stop_at:
            return
        time.sleep(STOP_DELAY)
        if self._counted == self.spec.stop_at and self.rank == 0:
            signal.raise_signal(signal.SIGUSR1)

    def _keep_initial(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the weights before the first step of an optimizer. All ranks are here: shards are
        gathered.
        """
        new = [each for each in _parameters([optimizer]) if id(each) not in self._initial]
        for each, tensor in zip(new, full_tensors(new), strict=True):
            self._initial[id(each)] = (
                tensor.detach().to("cpu", copy=True) if self.rank == 0 else None
            )

    def _write_start(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters([optimizer])
        self._write(
            START,
            world_size=self.world_size,
            runtime=self.loop is not None,
            dtype=str(parameters[0].dtype).removeprefix("torch."),
            autocast=self._autocast,
            weights=weights_digest(full_tensors(parameters)),
            seed=torch.initial_seed(),
            optimizer=type(optimizer).__name__,
        )

    def _write_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters([optimizer])
        gradients = full_tensors([each.grad for each in parameters if each.grad is not None])
        norm = math.sqrt(sum(float(each.detach().double().square().sum()) for each in gradients))
        is_known, is_first = self._backwards > 0, not self._has_gradient
        self._has_gradient = self._has_gradient or norm > 0
        is_small = sum(each.numel() for each in parameters) <= MAX_DIGESTED
        self._write(
            STEP,
            step=self.step,
            rows=self._rows,
            samples=self._samples if is_known else None,
            contents=self._contents if is_known else None,
            losses=self._losses,
            norm=norm,
            clip=self._clip,
            gradient=gradient_summary(gradients) if is_first and norm > 0 else None,
            rates=self._rates,
            uses=sorted(self._seen),
            weights=weights_digest(full_tensors(parameters)) if is_small else None,
        )
        self._clear()

    def end(self, *, is_last: bool = True) -> None:
        """Write or compare the final weights. All ranks are here: those of sharded parameters are
        gathered.
        """
        if self._is_ended or not self._optimizers or not self._steps_here:
            return
        self._is_ended = is_last
        parameters = _parameters(self._optimizers)
        tensors = full_tensors(parameters)
        shapes = [list(each.shape) for each in tensors]
        found: dict[str, Any] = {
            "step": self.step,
            "weights": weights_digest(tensors),
            "shapes": shapes,
        }
        found["modules"] = digest_modules()
        if self.rank == 0:
            names = self._names(parameters)
            found["differences"] = {
                name: compare(tensors, Path(path), names, steps=self.step)
                for name, path in self.spec.references.items()
            }
            if self.spec.weights:
                moved = measure_distance(
                    tensors, [self._initial.get(id(each)) for each in parameters]
                )
                write(tensors, Path(self.spec.weights), moved=moved)
        self._write(END, **found)

    def _see_uses(self, model: nn.Module) -> None:
        """Note what a model has that depends on the ranks, and turn dropout off if asked to.
        Compiled models and recurrent layers call no function of torch that could be wrapped.
        """
        for each in model.modules():
            is_norm = isinstance(each, nn.modules.batchnorm._BatchNorm)
            if is_norm and not isinstance(each, nn.SyncBatchNorm) and each.training:
                self._seen.add(BATCHNORM)
            has_rate = isinstance(each, (nn.MultiheadAttention, nn.RNNBase))
            name = "p" if isinstance(each, nn.modules.dropout._DropoutNd) else "dropout"
            if (has_rate or name == "p") and each.training and getattr(each, name) > 0:
                self._seen.add(DROPOUT)
                if DROPOUT in self.spec.changes:
                    setattr(each, name, 0.0)

    def _names(self, parameters: list[nn.Parameter]) -> list[str]:
        known = {
            id(parameter): name.removeprefix("module.")
            for model in self._models
            for name, parameter in model.named_parameters()
        }
        return [
            known.get(id(each), f"parameter {number}") for number, each in enumerate(parameters)
        ]

    def _write(self, kind: str, **values: Any) -> None:
        if not self._lines.append(json.dumps({"kind": kind, **values}) + "\n"):
            raise RunError(  # records with holes would show differences that are none
                f"The records of the proof cannot be written to {self.spec.folder}.",
                hint="Check the space there.",
            )


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
    every = (
        each
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    )
    return list({id(each): each for each in every}.values())
