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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.contract.foreign_records import LineWriter
from paceline.contract.rank_records import (
    DRAWS,
    DROPOUT,
    END,
    START,
    STEP,
    ProofSpec,
    record_path,
    weights_path,
)
from paceline.errors import RunError
from paceline.runtime.lr_scale import effective_rate
from paceline.runtime.proof.calls import Call, PendingCalls, tensors_of
from paceline.runtime.proof.weights import (
    compare,
    digest_modules,
    full_tensors,
    gradient_norms,
    project,
    weights_digest,
)

STOP_DELAY = 0.1  # seconds per step while a stop is due: ranks agree on it every 0.4 seconds
# A gradient of which no more than this many last places remain, as a share of all gradients, is
# zero but for rounding, such as that of a bias before BatchNorm. Adam makes steps of full size of
# it, in any direction.
NOISE_PLACES = 128
MAX_NOISE = 0.01


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
        self._pending = PendingCalls()
        self._counted = 0  # steps of this process
        self._has_gradient = False  # whether gradients that are not zero are recorded
        self._gradient_shares: dict[int, float] = {}  # the largest so far, by parameter
        self._is_ended = False
        self._rates: list[float] = []  # learning rates of this step
        self._autocast = ""
        self._uses: set[str] = set()  # what the script does that may depend on the rank
        self._calls: list[Call] = []  # of this step
        self._losses: list[float] = []  # of this step

    @property
    def is_here(self) -> bool:
        """Whether this is the rank itself, and not a worker of a data loader or another thread."""
        return os.getpid() == self._pid and threading.get_ident() == self._thread

    def end_at_exit(self) -> None:
        """End the records of a script that has trained fewer steps. Shards can no longer be
        gathered then.
        """
        parameters = _parameters(self._optimizers)
        if self.is_here and not any(hasattr(each, "full_tensor") for each in parameters):
            self.end()

    # -- what the patches of torch report
    # --------------------------------------------------------------

    def note_use(self, what: str) -> None:
        """Note that the model uses dropout, or BatchNorm, in training mode."""
        if self.is_here:
            self._uses.add(what)

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
        is_filler = micro is not None and micro.count == 0
        call = self._pending.add((args, kwargs), is_training=module.training, is_filler=is_filler)
        if not any(each is module for each in self._models):
            self._models.append(module)
            self._see_recurrent_dropout(module)
        device = next((each.device.type for each in tensors_of((args, kwargs))), "cpu")
        if torch.is_autocast_enabled(device):
            self._autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return call

    def note_loss(self, loss: torch.Tensor, state: list[Any]) -> None:
        """Note a loss after its backward pass, and the samples that it comes from. `state` is that
        before the pass.
        """
        if loss.numel() == 1:
            self._losses.append(float(loss.detach()))
        call = self._pending.take_trained_call()
        if call is not None and call.state != state:
            self._uses.add(DRAWS)
        if call is None:  # nothing is known of its samples
            call = Call([], None, is_training=True, is_filler=False)
        if not call.is_filler:
            self._calls.append(call)

    # -- steps
    # -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_here:
            return
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        if optimizer is not self._optimizers[0]:
            return
        if self.loop is None and self._counted >= self.spec.steps:
            self.end()
            raise SystemExit(0)
        if not self._counted:
            self._write_start(_parameters([optimizer]))
        self._rates = [
            effective_rate(optimizer, float(group["lr"])) for group in optimizer.param_groups
        ]

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_here and optimizer is self._optimizers[0]:
            self._counted += 1
            self._write_step(_parameters([optimizer]))
            self._stop_when_due()

    def _stop_when_due(self) -> None:
        """Ask for a stop, as a scheduler would. Steps that take a while let the ranks agree before
        the last one.
        """
        if self.spec.stop_at:
            time.sleep(STOP_DELAY)
            if self._counted == self.spec.stop_at and self.rank == 0:
                signal.raise_signal(signal.SIGUSR1)

    def _write_start(self, parameters: list[nn.Parameter]) -> None:
        self._write(
            START,
            runtime=self.loop is not None,
            dtype=self._autocast or str(parameters[0].dtype).removeprefix("torch."),
            weights=weights_digest(full_tensors(parameters)),
            seed=torch.initial_seed(),
        )

    def _write_step(self, parameters: list[nn.Parameter]) -> None:
        trained = [each for each in parameters if each.grad is not None]
        gradients = full_tensors([each.grad for each in trained])
        norms = gradient_norms(gradients)
        norm = math.hypot(*norms)
        summary = None
        if norm > 0:
            for each, own in zip(trained, norms, strict=True):
                before = self._gradient_shares.get(id(each), 0.0)
                self._gradient_shares[id(each)] = max(before, own / norm)
            if not self._has_gradient:
                summary = {"projections": project(gradients), "norms": norms}
                self._has_gradient = True
        is_known = bool(self._calls or self._losses)
        self._write(
            STEP,
            # the one that the optimizer has just done, from 1
            step=self._counted if self.loop is None else int(self.loop.current),
            rows=sum(each.rows for each in self._calls),
            samples=_join(each.indices for each in self._calls) if is_known else None,
            contents=_join(each.contents for each in self._calls) if is_known else None,
            losses=self._losses,
            norm=norm,
            gradient=summary,
            rates=self._rates,
        )
        self._calls, self._losses = [], []

    def end(self) -> None:
        """Write or compare the final weights. All ranks are here: those of sharded parameters are
        gathered.
        """
        if self._is_ended or not self._counted:
            return
        self._is_ended = True
        parameters = _parameters(self._optimizers)
        tensors = full_tensors(parameters)
        found: dict[str, Any] = {
            "weights": weights_digest(tensors),
            "shapes": [list(each.shape) for each in tensors],
            "modules": digest_modules(),
            "uses": sorted(self._uses),
        }
        if self.rank == 0:
            names = self._names(parameters)
            noise = self._noise(parameters, names)
            found["noise"] = noise
            if self.spec.reference:
                reference = weights_path(Path(self.spec.reference))
                found.update(compare(tensors, reference, names, noise=noise))
            path = weights_path(Path(self.spec.folder))
            torch.save([each.detach().cpu() for each in tensors], path)
        self._write(END, **found)

    def _noise(self, parameters: list[nn.Parameter], names: list[str]) -> list[str]:
        """Return the parameters whose gradients have always been zero but for rounding."""
        found = []
        for name, each in zip(names, parameters, strict=True):
            dtype = getattr(torch, self._autocast) if self._autocast else each.dtype
            limit = min(MAX_NOISE, NOISE_PLACES * torch.finfo(dtype).eps)
            if self._gradient_shares.get(id(each), 1.0) < limit:
                found.append(name)
        return found

    def _see_recurrent_dropout(self, model: nn.Module) -> None:
        """Note the dropout of recurrent layers, which call no function that could be wrapped, and
        turn it off if asked to.
        """
        for each in model.modules():
            if isinstance(each, nn.RNNBase) and each.training and each.dropout > 0:
                self._uses.add(DROPOUT)
                if DROPOUT in self.spec.changes:
                    each.dropout = 0.0

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


def _join(parts: Iterable[list[Any] | None]) -> list[Any] | None:
    """Put lists together; None if one of them is not known."""
    found: list[Any] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found
