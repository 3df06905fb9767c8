"""From a loss to an optimizer step: precision, accumulation, gradient scaling and clipping."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.step_boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.step_boundary.stragglers import StragglerDetector
from paceline.runtime.training import fsdp
from paceline.runtime.training.ddp import DDPModel
from paceline.runtime.training.fsdp import FSDPModel, is_sharded
from paceline.runtime.training.leftover_gradients import LeftoverGradients
from paceline.runtime.training.loss_weights import LossWeights
from paceline.runtime.training.wrap import Wrapper

_NO_AUTOCAST = contextlib.nullcontext()
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(eq=False)
class _OptimizerInfo:
    """What is known about an optimizer."""

    parameters: list[nn.Parameter]
    replicas: list[DDPModel]  # the models with DDP that it trains
    seen: list[int]  # their reductions that went into its last step
    sharded: bool
    covers_all: bool  # it holds all parameters: its zero_grad clears everything
    num_groups: int  # `add_param_group` may add more later
    num_models: int  # and so may `run.wrap`


class Gradients:
    """The part of a step that follows the forward. The loop calls `begin` before each forward."""

    def __init__(
        self, wrapper: Wrapper, *, precision: str, world_size: int, skip_nonfinite: bool
    ) -> None:
        self.wrapper = wrapper
        self.world_size = world_size
        self.device = wrapper.device
        self.loss_check: NonFiniteLossCheck | None = None
        self.stragglers: StragglerDetector | None = None
        self.scaler: Any = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        self.ends_steps = self.scaler is not None  # whether the end of a step has something to do
        self._dtype = AUTOCAST_DTYPES.get(precision)
        self.skips_nonfinite = skip_nonfinite
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, _OptimizerInfo]] = {}
        self._mean_scale = 1.0
        self._weights = LossWeights(self.device, world_size)
        self._samples: int | None = None  # of the global batch, and of this rank's slice
        self._count: int | None = None
        self.is_last_micro_step = True
        self._single = True  # the step has one micro-step
        self._syncing = True
        self._scaled = False  # `backward` has been called in this step
        self._leftovers = LeftoverGradients(wrapper.parameters)
        self._stepped: list[torch.optim.Optimizer] = []  # with the scaler, in this step
        self._updating: torch.optim.Optimizer | None = None
        self._did_step = False
        self._has_updated = False  # any optimizer, in this step
        self._plain: list[_OptimizerInfo] = []  # optimizers that the script steps itself
        self._warned_of_pending = False
        self._step_hook = register_optimizer_step_pre_hook(self._before_any_step)

    def close(self) -> None:
        """Take all hooks off models and optimizers."""
        self._step_hook.remove()
        self.wrapper.close()

    # -- called by the loop
    # ----------------------------------------------------------------------------

    def begin(
        self,
        mean_scale: float,
        samples: int | None = None,
        count: int | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """Begin a micro-step, before its forward: set its weight, and whether the optimizer steps
        after it.
        """
        self._mean_scale, self._samples, self._count, self.is_last_micro_step = (
            mean_scale,
            samples,
            count,
            last,
        )
        self._single = first and last
        if first:
            self._scaled = False
        if not self._single:
            self._weights.begin_micro_step(first=first)
        if last is not self._syncing:
            self._syncing = last
            for model in self.wrapper.models:
                model.set_gradient_sync(last)

    def reset(self) -> None:
        """Outside of `steps`, treat every backward as a whole step."""
        self.end_step()
        self.begin(1.0)

    def end_step(self) -> None:
        """End a step, at the boundary: update the gradient scaler, and clear gradients that belong
        to no update.
        """
        self._leftovers.end_step()
        if self._stepped:
            self._update_scale(waiting=self._leftovers.on)
        if self._weights and self._has_updated:
            self._weights.clear()
            self._check_none_weighted()
        self._has_updated = False

    def _update_scale(self, *, waiting: bool) -> None:
        """Update the gradient scaler. Gradients that wait for their update get the new scale."""
        before = self.scaler._scale.clone()
        self.scaler.update()
        self._stepped.clear()
        if waiting:
            grads = [p.grad for p in self.all_parameters() if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, self.scaler._scale / before)

    def _check_none_weighted(self) -> None:
        """Raise UsageError if an optimizer has skipped the step: its gradients would lose what
        they are divided by.
        """
        for model in self.wrapper.models:
            for name, parameter in model.model.named_parameters():
                if parameter.grad is not None:
                    raise UsageError(
                        f"{name} has gradients of losses with a weight, but no update has used "
                        "them in this step.",
                        hint="Update every optimizer in each step, or freeze parameters that are "
                        "not trained in this "
                        "step (requires_grad_(False)).",
                    )

    # -- called by captured steps
    # ----------------------------------------------------------------------

    def micro_step(self) -> tuple[Any, ...]:
        """Return all that distinguishes this micro-step from others, apart from its batch."""
        return self._mean_scale, self._samples, self._count, self.is_last_micro_step, self._single

    def capture_obstacle(self) -> str | None:
        """Return why steps like this one cannot be captured, if so."""
        if not self._single and self._leftovers.on:
            return "several optimizers with accumulate share their gradients between micro-steps"
        if not self._single and self._weights.used:
            return "the weights of losses add up over micro-steps"
        return None

    def all_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all models and optimizers."""
        known = (info.parameters for _, info in self._optimizers.values())
        return list(
            {id(each): each for each in itertools.chain(self.wrapper.parameters(), *known)}.values()
        )

    def end_captured_step(self) -> None:
        """End a step inside its capture. Raises UsageError if a weight is a number of the host."""
        if self.is_last_micro_step:
            self._weights.check_on_device()
            self._leftovers.end_step()
            self._weights.clear()
            self._has_updated = False

    def warn_of_pending(self) -> None:
        """Say once that a checkpoint lacks gradients, which wait for an optimizer that skips
        steps.
        """
        # cleared by the script
        plain = {id(parameter) for info in self._plain for parameter in info.parameters}
        pending = [
            name
            for model in self.wrapper.models
            for name, parameter in model.model.named_parameters()
            if parameter.grad is not None and id(parameter) not in plain
        ]
        if pending and not self._warned_of_pending:
            self._warned_of_pending = True
            note(
                f"{len(pending)} parameters, such as {pending[0]}, have gradients that wait for "
                "an update of their "
                "optimizer. A checkpoint does not contain them: if you resume from this one, the "
                "update lacks them. "
                "Save when all optimizers have been updated, with save_every_steps."
            )

    # -- called by the script
    # --------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs the forward pass in the session's precision. Does nothing in
        fp32.
        """
        if self._dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self.device.type, dtype=self._dtype)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run `loss.backward()`, scaled for accumulation and for fp16.

        Args:
            loss: The mean over the samples that this rank got. Short slices are weighted by their
            true count. weight: With `weight=n`, `loss` is a sum over n samples, tokens or whatever
            you count: a number, or a tensor
                with one element. `run.update` divides the gradients by the total of the weights
                over all micro-steps and ranks, so that they are those of the mean over all tokens
                of the step.
            retain_graph: As in torch: keep the graph for another backward.

        Raises:
            UsageError: `weight` is not a number, or an earlier loss for the same update had none.
        """
        if self.stragglers is not None:
            self.stragglers.mark_backward()
        if self.loss_check is not None:
            self.loss_check.record(loss)
        leftovers = self._leftovers
        before = None
        if leftovers.on or len(self.wrapper.models) > 1:
            leftovers.on = self.ends_steps = True
            before = leftovers.begin_loss() if self._single else leftovers.state()
        self._scaled = True
        self._weights.begin_loss(weight is not None, self._single)
        scale = self._mean_scale if weight is None else self._weigh(weight)
        if scale != 1.0:
            loss = loss * scale
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if before is not None:
            leftovers.record_loss(before)

    def _weigh(self, weight: Any) -> float:
        """Note the weight of a loss, and return the factor that the loss gets at once."""
        self.ends_steps = True
        is_filler = self._count == 0  # it only keeps this rank in step with the others
        scale = self._weights.add(0 if is_filler else weight, samples=self._samples)
        return 0.0 if is_filler else scale

    def _weigh_nothing(self, info: _OptimizerInfo) -> None:
        """Take part in the sum of all weights if this rank has no loss for an update, and others
        may have one.
        """
        if (info.replicas or info.sharded) and all(
            parameter.grad is None for parameter in info.parameters
        ):
            self._weights.begin_loss(True, self._single)
            self._weigh(0)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
        *,
        closure: Callable[[], torch.Tensor] | None = None,
    ) -> bool:
        """Unscale and clip the gradients, step the optimizer, and clear the gradients.

        Call it once per optimizer after `backward`.

        Args:
            optimizer: Any torch optimizer, built after `run.wrap`.
            clip: The maximum norm of all gradients of this optimizer; None for no clipping.
            closure: For LBFGS: a function that computes the loss, calls `run.backward` and returns
            the loss. The
                optimizer calls it as often as it likes, with cleared gradients, and gets gradients
                and loss averaged over all ranks.

        Returns:
            True if the optimizer stepped: step schedulers then. False on micro-steps that only
            accumulate, and on steps skipped by `on_nonfinite="skip"` or by the gradient scaler of
            fp16.

        Raises:
            UsageError: The optimizer holds parameters from before `run.wrap` or of no wrapped
            model, fp16 is used
                with FSDP, the gradients do not come from `run.backward` where they must be scaled,
                or a closure is used with accumulation, fp16 or `on_nonfinite="skip"`.
        """
        info = self._find(optimizer)
        if info is None:
            info = self._inspect(optimizer)
        if closure is not None and (
            not self._single or self.scaler is not None or self.skips_nonfinite
        ):
            raise UsageError(
                "A closure works neither with accumulate nor with fp16 or on_nonfinite='skip'.",
                hint="Compute the loss of the whole batch in the closure, in fp32 or bf16.",
            )
        if not self.is_last_micro_step:
            self._weights.end_turn()
            return False
        leftovers = self._leftovers
        if (
            closure is None
            and not self._scaled
            and (self.scaler is not None or self._needs_scale(info))
        ):
            raise self._unscaled_error()
        self._updating = optimizer
        try:
            if closure is None:
                stepped = self._step(optimizer, info, clip)
            else:
                optimizer.step(functools.partial(self._evaluate, optimizer, info, clip, closure))  # type: ignore[arg-type]
                stepped = True
        finally:
            self._updating = None
        optimizer.zero_grad(set_to_none=True)
        self._weights.end_turn()
        self._has_updated = True
        if leftovers.on or not info.covers_all:
            leftovers.on = self.ends_steps = True
            leftovers.record_update(info.parameters)
        return stepped

    def _reduce(self, info: _OptimizerInfo) -> None:
        for index, replica in enumerate(info.replicas):
            info.seen[index] = replica.reduce_gradients(info.seen[index])

    def _normalize(self, info: _OptimizerInfo) -> None:
        """Divide the gradients of sums by the total of their weights."""
        factor = self._weights.factor
        grads = [fsdp.local_part(p.grad) for p in info.parameters if p.grad is not None]
        if factor is not None and grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))  # FSDP may keep them on the CPU

    def _evaluate(
        self,
        optimizer: torch.optim.Optimizer,
        info: _OptimizerInfo,
        clip: float | None,
        closure: Callable[[], Any],
    ) -> torch.Tensor:
        """Run a closure once. Returns its loss, averaged over the ranks as the gradients are."""
        optimizer.zero_grad(set_to_none=True)
        self._weights.clear()
        loss = closure()
        if not isinstance(loss, torch.Tensor):
            raise UsageError("The closure returned no loss.", hint="End it with `return loss`.")
        self._reduce(info)
        self._normalize(info)
        if clip is not None:
            self._clip(info, clip)
        factor = self._weights.factor
        loss = loss.detach() * (
            self._mean_scale if factor is None else self._weights.scale * factor
        )
        if self.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.world_size
        return loss

    def _clip(self, info: _OptimizerInfo, clip: float) -> Any:
        if info.sharded:
            return fsdp.clip_gradients(info.parameters, clip, self.wrapper.mesh)
        return nn.utils.clip_grad_norm_(info.parameters, clip)

    def _step(
        self, optimizer: torch.optim.Optimizer, info: _OptimizerInfo, clip: float | None
    ) -> bool:
        weights = self._weights
        if weights.used and not weights:
            self._weigh_nothing(info)
        if info.replicas:
            self._reduce(info)
        scaler = self.scaler
        if scaler is not None:
            # a loop without `steps`: a second update begins the next step
            if optimizer in self._stepped:
                self._update_scale(waiting=True)
            scaler.unscale_(optimizer)
        if weights:
            self._normalize(info)
        norm = None if clip is None else self._clip(info, clip)
        if scaler is not None:
            self._did_step = False
            scaler.step(optimizer)
            self._stepped.append(optimizer)
            return self._did_step
        if self.skips_nonfinite and not self._is_finite(info, norm):
            return False
        optimizer.step()
        return True

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs before each step of any optimizer in the process: by `update`, or by `opt.step()`
        in the script.
        """
        if optimizer is self._updating:
            self._did_step = True
            return
        if self._updating is not None and _is_inside(optimizer, self._updating):
            return  # an optimizer that wraps another one
        info = self._find(optimizer)
        if info is None:
            if not any(
                self.wrapper.owns(p) for group in optimizer.param_groups for p in group["params"]
            ):
                return  # it trains something else
            info = self._inspect(optimizer)
        if not self.is_last_micro_step:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called in a micro-step that only "
                "accumulates gradients.",
                hint="Use run.backward(loss) and run.update(opt), which wait for the last "
                "micro-step. Or leave out "
                "accumulate.",
            )
        if not self._scaled and self._needs_scale(info):
            raise self._unscaled_error()
        if self.scaler is not None and self._scaled:
            raise UsageError(
                f"{type(optimizer).__name__}.step() would use gradients that run.backward has "
                "scaled for fp16.",
                hint="Use run.update(opt), which unscales them.",
            )
        if self._weights:
            raise UsageError(
                f"{type(optimizer).__name__}.step() would use gradients that are not yet divided "
                "by their weights.",
                hint="Use run.update(opt), which divides them.",
            )
        if (
            self.world_size > 1
            and kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        ):
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) would compute another loss on each "
                "rank.",
                hint="Use run.update(opt, closure=closure), which averages losses and gradients.",
            )
        if info not in self._plain:
            self._plain.append(info)
        self._reduce(info)

    def _needs_scale(self, info: _OptimizerInfo) -> bool:
        """Return whether losses of this step need a factor. Ranks agree: with equal slices, it is
        1 on all of them.
        """
        return not self._single or (self._mean_scale != 1.0 and bool(info.replicas or info.sharded))

    def _unscaled_error(self) -> UsageError:
        reason = "ranks have different numbers of samples in this step"
        if self.scaler is not None:
            reason = "precision='fp16' scales losses"
        elif not self._single:
            reason = "steps with accumulate scale losses"
        return UsageError(
            f"The gradients come from loss.backward(), but {reason}.",
            hint="Use run.backward(loss), which scales the loss.",
        )

    def _is_finite(self, info: _OptimizerInfo, norm: Any) -> bool:
        """Return whether the gradient norm is finite. Gradients are already reduced, so all ranks
        agree.

        This is the one device sync that `on_nonfinite="skip"` costs.
        """
        if norm is None and info.sharded:
            norm = fsdp.gradient_norm(info.parameters, self.wrapper.mesh)
        elif norm is None:
            norm = nn.utils.get_total_norm([p.grad for p in info.parameters if p.grad is not None])
        return math.isfinite(norm.item())

    def _find(self, optimizer: torch.optim.Optimizer) -> _OptimizerInfo | None:
        """Return what is known about an optimizer, if it still holds."""
        known, info = self._optimizers.get(id(optimizer), (None, None))
        if info is None or known is not optimizer or info.num_groups != len(optimizer.param_groups):
            return None
        return info if info.num_models == len(self.wrapper.models) else None

    def _inspect(self, optimizer: torch.optim.Optimizer) -> _OptimizerInfo:
        parameters = self.wrapper.check_optimizer(optimizer)
        if self.scaler is not None and any(
            isinstance(model, FSDPModel) for model in self.wrapper.models
        ):
            raise UsageError(
                "precision='fp16' does not work with FSDP: the gradient scaler cannot see all "
                "shards.",
                hint="Use precision='bf16', which needs no scaler.",
            )
        own = {id(parameter) for parameter in parameters}
        replicas = [
            each
            for each in self.wrapper.models
            if isinstance(each, DDPModel) and any(id(p) in own for p in each.model.parameters())
        ]
        info = _OptimizerInfo(
            parameters,
            replicas,
            seen=[0] * len(replicas),
            sharded=any(is_sharded(parameter) for parameter in parameters),
            covers_all=all(
                id(p) in own
                for p in self.wrapper.parameters()
                if p.is_floating_point() or p.is_complex()
            ),
            num_groups=len(optimizer.param_groups),
            num_models=len(self.wrapper.models),
        )
        known, old = self._optimizers.get(id(optimizer), (None, None))
        if old is not None and known is optimizer:
            seen = dict(zip(map(id, old.replicas), old.seen, strict=True))
            info.seen = [seen.get(id(each), 0) for each in replicas]
        self._optimizers[id(optimizer)] = (optimizer, info)
        return info


def _is_inside(optimizer: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters of an optimizer are also those of another one."""
    own, others = (
        {id(parameter) for group in each.param_groups for parameter in group["params"]}
        for each in (optimizer, outer)
    )
    return own <= others
